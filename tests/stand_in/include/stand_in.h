// What the stand-in's sources share.
#pragma once
#include <cuda_runtime_api.h>

// Remember an error for cudaGetLastError, and give it back.
cudaError_t fail(cudaError_t error);
