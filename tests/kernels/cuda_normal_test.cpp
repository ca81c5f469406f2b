// Random numbers have the same bits on CPU and GPU.
#include "tests/kernels/cuda_support.h"
#include "trireme/kernels/tensor_ops.h"

namespace trireme::kernels::cuda {
namespace {

class Normal : public CudaTest {};

TEST_F(Normal, GivesTheBitsOfTheCpu) {
  for (const auto& [count, first] : {std::pair<int64_t, int64_t>{0, 0}, {1, 5}, {10'000'019, 1LL << 33}}) {
    at::Tensor host = at::empty({count}), device = at::empty({count}, at::TensorOptions(at::kCUDA));
    kernels::fill_normal(host, 77, {first}, 0.02);
    kernels::fill_normal(device, 77, {first}, 0.02);
    EXPECT_TRUE(host.equal(device.cpu())) << count;
  }
}

TEST_F(Normal, GivesSlicesTheBitsOfTheCpu) {
  const Counters at{.first = 12, .run = 37, .stride = 1000};
  at::Tensor host = at::empty({100'003}), device = at::empty({100'003}, at::TensorOptions(at::kCUDA));
  kernels::fill_normal(host, 77, at, 0.02);
  kernels::fill_normal(device, 77, at, 0.02);
  EXPECT_TRUE(host.equal(device.cpu()));
  at::Tensor kept = at::empty({100'003}, at::kBool), kept_there = kept.to(at::kCUDA);
  kernels::fill_kept(kept, 77, at, 0.3);
  kernels::fill_kept(kept_there, 77, at, 0.3);
  EXPECT_TRUE(kept.equal(kept_there.cpu()));
}

}  // namespace
}  // namespace trireme::kernels::cuda
