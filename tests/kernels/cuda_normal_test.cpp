// Random numbers have the same bits on CPU and GPU.
#include "tests/kernels/cuda_support.h"
#include "trireme/kernels/tensor_ops.h"

namespace trireme::kernels::cuda {
namespace {

class Normal : public CudaTest {};

TEST_F(Normal, GivesTheBitsOfTheCpu) {
  for (const auto& [count, first] : {std::pair<int64_t, int64_t>{0, 0}, {1, 5}, {10'000'019, 1LL << 33}}) {
    at::Tensor host = at::empty({count}), device = at::empty({count}, at::TensorOptions(at::kCUDA));
    kernels::fill_normal(host, 77, first, 0.02);
    kernels::fill_normal(device, 77, first, 0.02);
    EXPECT_TRUE(host.equal(device.cpu())) << count;
  }
}

}  // namespace
}  // namespace trireme::kernels::cuda
