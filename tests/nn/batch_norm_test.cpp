#include "tests/nn/batch_norm_cases.h"

#include <ATen/Parallel.h>

#include "tests/support/refusal.h"
#include "trireme/base/error.h"
#include "trireme/nn/group_norm.h"
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
                       {"create_graph", "nn.batch_norm", "torch's own modules"});
  const at::Tensor grouped = group_norm(tensors.x, tensors.weight, tensors.bias, {.groups = 2}).sum();
  test::expect_refusal([&] { grouped.backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
                       {"create_graph", "nn.group_norm"});
}

class FusedGroupNorm : public ::testing::TestWithParam<BatchNormCase> {};

void check_group_norm(const BatchNormCase& test, int64_t groups, at::ScalarType dtype) {
  BatchNormTensors ours(test, at::kCPU, dtype);
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.detach().to(at::kDouble).requires_grad_() : tensor;
  };
  const at::Tensor x = wide(ours.x), weight = wide(ours.weight), bias = wide(ours.bias),
                   residual = wide(ours.residual);
  const at::Tensor y = group_norm(ours.x, ours.weight, ours.bias,
                                  {.groups = groups, .residual = ours.residual, .relu = test.relu});
  y.backward(ours.dy);
  at::Tensor wanted = at::group_norm(x, groups, weight, bias, 1e-5, false);
  if (test.residual) wanted = wanted + residual;
  if (test.relu) wanted = wanted * y.detach().to(at::kDouble).gt(0.0);
  wanted.backward(ours.dy.to(at::kDouble));
  const double limit = (dtype == at::kFloat ? 1e-5 : 1.2e-2) * (1.0 + test.offset);
  EXPECT_LT(batch_norm_error(y, wanted.detach()), limit) << groups;
  EXPECT_LT(batch_norm_error(ours.x.grad(), x.grad()), limit) << groups;
  EXPECT_LT(batch_norm_error(ours.weight.grad(), weight.grad()), limit) << groups;
  EXPECT_LT(batch_norm_error(ours.bias.grad(), bias.grad()), limit) << groups;
  if (test.residual) {
    EXPECT_LT(batch_norm_error(ours.residual.grad(), residual.grad()), limit) << groups;
  }
}

TEST_P(FusedGroupNorm, IsTorchsGroupNormWithWhatFollows) {
  for (const int64_t groups : {1, 2, 8}) {
    check_group_norm(GetParam(), groups, at::kFloat);
    check_group_norm(GetParam(), groups, at::kBFloat16);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, FusedGroupNorm, ::testing::ValuesIn(batch_norm_cases()));

TEST(FusedBatchNormBits, OfGroupsDoNotDependOnTheBatchOrTheNumberOfThreads) {
  const BatchNormCase test{{6, 40, 13, 11}, true, true};
  const BatchNormTensors tensors(test, at::kCPU, at::kFloat);
  const auto run = [&](int64_t first, int64_t count) {
    const c10::NoGradGuard no_grad;
    return group_norm(tensors.x.narrow(0, first, count), tensors.weight, tensors.bias,
                      {.groups = 4, .residual = tensors.residual.narrow(0, first, count), .relu = true});
  };
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor whole = run(0, 6);
  at::set_num_threads(3);
  EXPECT_TRUE(at::equal(run(0, 6), whole));
  EXPECT_TRUE(at::equal(run(2, 1), whole.narrow(0, 2, 1)));
  at::set_num_threads(threads);
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
