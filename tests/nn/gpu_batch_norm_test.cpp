// Batch norms and maxima of images on a GPU: right, and to the same bits each time. Skipped without a GPU.
#include "tests/nn/batch_norm_cases.h"
#include "trireme/kernels/device.h"
#include "trireme/nn/max_pool.h"

namespace trireme::nn {
namespace {

const c10::Device kGpu(c10::kCUDA, 0);

class GpuBatchNorm : public ::testing::TestWithParam<BatchNormCase> {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  }
};

TEST_P(GpuBatchNorm, IsTorchsBatchNormWithWhatFollows) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(c10::toString(dtype));
    check_batch_norm(GetParam(), kGpu, dtype);
    check_batch_norm_repeats(GetParam(), kGpu, dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuBatchNorm, ::testing::ValuesIn(batch_norm_cases()));

TEST(GpuBatchNormValues, ThatAreNotFiniteShow) {
  if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  check_batch_norm_keeps_nan(kGpu);
}

TEST(GpuBatchNormValues, OfManyRowsAddUp) {
  if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  check_batch_norm({{64, 64, 112, 112}, true, true, 3.0}, kGpu, at::kFloat);
}

/// Values and gradients of torch's maxima, also where several are equal.
TEST(GpuMaxPool, IsTorchsMaxPool) {
  if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  struct Window {
    int64_t kernel, stride, padding;
  };
  for (const Window& window : {Window{3, 2, 1}, Window{2, 2, 0}, Window{3, 1, 1}, Window{5, 3, 2}}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor values = at::randn({3, 24, 13, 17}).mul_(2.0).round_();  // many are equal
      const at::Tensor x =
          values.to(kGpu, dtype).contiguous(at::MemoryFormat::ChannelsLast).detach().requires_grad_();
      const at::Tensor wide = values.to(at::kDouble).detach().requires_grad_();
      const at::Tensor y = max_pool(x, window.kernel, window.stride, window.padding);
      const at::Tensor wanted =
          at::max_pool2d(wide, {window.kernel, window.kernel}, {window.stride, window.stride},
                         {window.padding, window.padding});
      ASSERT_EQ(y.sizes(), wanted.sizes());
      EXPECT_TRUE(at::equal(y.detach().to(at::kCPU, at::kDouble), wanted.detach()));
      const at::Tensor dy = at::randint(-4, 5, wanted.sizes(), at::kDouble);
      y.backward(dy.to(kGpu, dtype));
      wanted.backward(dy);
      EXPECT_TRUE(at::equal(x.grad().to(at::kCPU, at::kDouble), wide.grad()));
    }
  }
  const at::Tensor x = at::zeros({1, 8, 4, 4}, kGpu).contiguous(at::MemoryFormat::ChannelsLast);
  x.select(2, 1).select(2, 1).fill_(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(max_pool(x, 3, 2, 1).isnan().any().item<bool>());
}

}  // namespace
}  // namespace trireme::nn
