// Whether this binary holds code that the current GPU can run.
#include "trireme/kernels/cuda_kernels.h"
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

__global__ void any_kernel() {}

}  // namespace

int code_for_current_gpu() {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, any_kernel);
  if (status != cudaSuccess) cudaGetLastError();  // not to be taken for a failure of the next launch
  return status;
}

}  // namespace trireme::kernels::cuda
