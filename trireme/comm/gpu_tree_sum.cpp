#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "trireme/base/error.h"
#include "trireme/comm/ordered.h"
#include "trireme/kernels/tree_sum.h"

namespace trireme::comm {

void tree_sum_on_gpu(at::Tensor& output, const at::Tensor& rows, int64_t ranks) {
  const c10::cuda::CUDAGuard guard(rows.device());
  void* const stream = c10::cuda::getCurrentCUDAStream(rows.device().index()).stream();
  const int64_t count = output.numel();
  auto* const out = output.mutable_data_ptr<float>();
  const int error = rows.scalar_type() == at::kFloat
                        ? kernels::tree_sum_cuda(out, rows.const_data_ptr<float>(), ranks, count, stream)
                        : kernels::tree_sum_bf16_cuda(
                              out, static_cast<const uint16_t*>(rows.const_data_ptr()), ranks, count, stream);
  TRIREME_CHECK(error == 0, "[comm.reduce_scatter_ordered] tree_sum over {} ranks of {} elements: {}", ranks,
                count, cudaGetErrorString(static_cast<cudaError_t>(error)));
}

}  // namespace trireme::comm
