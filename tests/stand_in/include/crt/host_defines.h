// The words of CUDA's headers that a C++ compiler does not know.  torch's packages bring
// cuda_runtime_api.h without this one.
#pragma once

#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH_LIST__ 900
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_SAFE_CALL(x) x
