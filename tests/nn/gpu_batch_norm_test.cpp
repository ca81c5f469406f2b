// Batch norms on a GPU: right, and to the same bits each time. Skipped without a GPU.
#include "tests/nn/batch_norm_cases.h"
#include "trireme/kernels/device.h"

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

}  // namespace
}  // namespace trireme::nn
