#pragma once
// Calls of CUDA that may fail, where something else is done then. Only in builds with CUDA.
#include <cuda_runtime_api.h>

namespace trireme::comm {

/// Whether it is cudaSuccess. Another error is cleared: the next launch would report it.
inline bool succeeds(cudaError_t error) {
  if (error == cudaSuccess) return true;
  cudaGetLastError();
  return false;
}

}  // namespace trireme::comm
