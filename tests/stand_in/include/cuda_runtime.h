// What nccl.h needs of CUDA's header, which asks for more than torch's packages bring.
#pragma once
#include <cuda_runtime_api.h>
