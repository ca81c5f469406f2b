#include "tests/nn/batch_norm_cases.h"

#include <ATen/Parallel.h>

#include "tests/support/refusal.h"
#include "trireme/base/error.h"
#include "trireme/nn/image_layers.h"

namespace trireme::nn {
namespace {

class FusedBatchNorm : public ::testing::TestWithParam<BatchNormCase> {};

TEST_P(FusedBatchNorm, IsTorchsBatchNormWithWhatFollows) {
  check_batch_norm(GetParam(), at::kCPU, at::kFloat);
  check_batch_norm(GetParam(), at::kCPU, at::kBFloat16);
}

INSTANTIATE_TEST_SUITE_P(Shapes, FusedBatchNorm, ::testing::ValuesIn(batch_norm_cases()));

TEST(FusedBatchNormBits, DoNotDependOnTheNumberOfThreads) {
  const BatchNormCase test{{6, 40, 31, 29}, true, true};
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  BatchNormTensors one(test, at::kCPU, at::kFloat), two(test, at::kCPU, at::kFloat);
  const at::Tensor first = one.run(true);
  first.backward(one.dy);
  at::set_num_threads(3);
  const at::Tensor second = two.run(true);
  second.backward(two.dy);
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(first, second));
  EXPECT_TRUE(at::equal(one.x.grad(), two.x.grad()));
  EXPECT_TRUE(at::equal(one.weight.grad(), two.weight.grad()));
}

TEST(FusedBatchNormBits, ShowWhatIsNotFinite) {
  check_batch_norm_keeps_nan(at::kCPU);
}

TEST(FusedBatchNormBits, HaveNoSecondDerivative) {
  BatchNormTensors tensors({{2, 8, 3, 3}}, at::kCPU, at::kFloat);
  const at::Tensor loss = tensors.run(false).sum();
  test::expect_refusal([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
                       {"create_graph", "torch's BatchNorm"});
}

/// The layer takes the fused function for channels-last images and torch's for others, to the same result.
TEST(BatchNormLayer, GivesTheSameInAnyLayout) {
  BatchNorm fused(24), plain(24);
  for (BatchNorm* layer : {&fused, &plain}) {
    const c10::NoGradGuard no_grad;
    layer->weight.copy_(at::linspace(0.5, 2.0, 24));
    layer->bias.copy_(at::linspace(-1.0, 1.0, 24));
  }
  const at::Tensor x = at::randn({3, 24, 7, 5}), residual = at::randn({3, 24, 7, 5});
  const auto last = at::MemoryFormat::ChannelsLast;
  for (int step = 0; step < 3; ++step) {
    const After after{.residual = residual, .relu = true};
    const at::Tensor wanted = plain.forward(x, Statistics::kUpdate, after);
    const at::Tensor got = fused.forward(x.contiguous(last), Statistics::kUpdate,
                                         {.residual = residual.contiguous(last), .relu = true});
    EXPECT_LT((got - wanted).abs().max().item<double>(), 1e-5);
  }
  EXPECT_LT((fused.running_var - plain.running_var).abs().max().item<double>(), 1e-5);
  EXPECT_EQ(fused.num_batches_tracked.item<int64_t>(), 3);
  const at::Tensor kept = fused.running_mean.clone();
  fused.forward(x.contiguous(last), Statistics::kLeave);
  EXPECT_TRUE(at::equal(fused.running_mean, kept)) << "computed again in backward";
  fused.eval();
  plain.eval();
  EXPECT_LT((fused.forward(x.contiguous(last)) - plain.forward(x)).abs().max().item<double>(), 1e-5);
}

}  // namespace
}  // namespace trireme::nn
