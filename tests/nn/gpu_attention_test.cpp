// Attention on a GPU at the head sizes and lengths that models have: output and gradients against the formula
// in double, by every backend, and the same bits every time where that is asked for. Skipped without a GPU.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <tuple>

#include "tests/support/relative_error.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/repeatable.h"
#include "trireme/nn/attention.h"

namespace trireme::nn {
namespace {

class GpuAttention : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  }
  at::ScalarType type() const { return GetParam(); }
};

/// Inputs of one call, normal random numbers rounded to `type`.
struct Problem {
  Problem(at::ScalarType type, int64_t batch, int64_t length, const AttentionShape& of)
      : shape(of), rope(make_rope_table(length, of.head_dim, 1e4, at::kCUDA)) {
    const int64_t width = (of.heads + 2 * of.kv_heads) * of.head_dim;
    qkv = at::randn({batch, length, width}, at::TensorOptions(at::kCUDA)).to(type);
    d_output = at::randn({batch, length, of.heads * of.head_dim}, at::TensorOptions(at::kCUDA)).to(type);
  }
  AttentionShape shape;
  RopeTable rope;
  at::Tensor qkv, d_output;
};

struct Result {
  at::Tensor output, d_qkv;
};

Result compute(const Problem& problem) {
  const at::Tensor leaf = problem.qkv.detach().clone().requires_grad_(true);
  // Attention overwrites its input, which must not be a leaf.
  const at::Tensor output = causal_attention(leaf * 1.0, problem.shape, problem.rope);
  const auto grads = torch::autograd::grad({output}, {leaf}, {problem.d_output});
  return {output.detach(), grads[0]};
}

/// softmax(Q K^T / sqrt(d)) V below the diagonal, in double, one query head of one sequence at a time.
Result exactly(const Problem& problem) {
  const auto [heads, kv_heads, head_dim, kind] = problem.shape;
  const int64_t length = problem.qkv.size(1), group = heads / kv_heads;
  const at::Tensor leaf = problem.qkv.detach().to(at::kDouble).requires_grad_(true);
  const at::Tensor cosine = problem.rope.cosine.to(at::kDouble), sine = problem.rope.sine.to(at::kDouble);
  const at::Tensor hidden = at::ones({length, length}, at::TensorOptions(at::kCUDA).dtype(at::kBool)).triu(1);
  const auto turned = [&](const at::Tensor& x) {  // (T, hd)
    const auto halves = x.chunk(2, -1);
    return at::cat({halves[0] * cosine - halves[1] * sine, halves[1] * cosine + halves[0] * sine}, -1);
  };
  const auto head_of = [&, width = head_dim](int64_t sequence, int64_t index) {
    return leaf[sequence].narrow(1, index * width, width);
  };
  at::Tensor output = at::zeros(problem.d_output.sizes(), leaf.options().requires_grad(false));
  at::Tensor d_qkv = at::zeros_like(output).resize_(leaf.sizes()).zero_();
  for (int64_t sequence = 0; sequence < leaf.size(0); ++sequence) {
    for (int64_t head = 0; head < heads; ++head) {
      const at::Tensor query = turned(head_of(sequence, head));
      const at::Tensor key = turned(head_of(sequence, heads + head / group));
      const at::Tensor value = head_of(sequence, heads + kv_heads + head / group);
      const at::Tensor scores = (at::matmul(query, key.t()) / std::sqrt(static_cast<double>(head_dim)))
                                    .masked_fill(hidden, -INFINITY);
      const at::Tensor one = at::matmul(at::softmax(scores, -1), value);
      const at::Tensor d_one =
          problem.d_output[sequence].narrow(1, head * head_dim, head_dim).to(at::kDouble);
      d_qkv += torch::autograd::grad({one}, {leaf}, {d_one})[0];
      output[sequence].narrow(1, head * head_dim, head_dim).copy_(one.detach());
    }
  }
  return {output, d_qkv};
}

/// Twice the spacing of numbers near 1: the result is rounded once, and so are probabilities and their
/// gradients on their way into tensor cores, each by half a spacing at most.
double bound_of(at::ScalarType type) {
  if (type == at::kBFloat16) return 2 * 0x1.0p-8;
  return type == at::kHalf ? 2 * 0x1.0p-11 : 1e-5;
}

TEST_P(GpuAttention, FollowsTheFormulaAtTheSizesOfModels) {
  at::manual_seed(1);
  for (const int64_t length : {1024, 4096, 8192}) {
    for (const int64_t head_dim : {64, 128}) {
      const Problem problem(type(), 1, length, {.heads = 4, .kv_heads = 2, .head_dim = head_dim});
      const Result exact = exactly(problem);
      for (const bool repeats : {false, true}) {
        const kernels::Repeatable repeatable(repeats);
        const Result got = compute(problem);
        SCOPED_TRACE(fmt::format("T {}, head size {}, {}", length, head_dim,
                                 name(attention_backend(at::kCUDA, type(), length, head_dim, 0.0))));
        EXPECT_LT(test::relative_error(got.output, exact.output), bound_of(type()));
        const int64_t queries = 4 * head_dim, keys = 2 * head_dim;
        for (const auto& [part, first, width] : {std::tuple("queries", int64_t{0}, queries),
                                                 {"keys", queries, keys},
                                                 {"values", queries + keys, keys}}) {
          EXPECT_LT(
              test::relative_error(got.d_qkv.narrow(2, first, width), exact.d_qkv.narrow(2, first, width)),
              bound_of(type()))
              << part;
        }
      }
    }
  }
}

TEST_P(GpuAttention, EagerFollowsTheFormulaAndRepeatsItsBits) {
  at::manual_seed(5);
  for (const int64_t kv_heads : {2, 4}) {
    const Problem problem(
        type(), 2, 1024,
        {.heads = 4, .kv_heads = kv_heads, .head_dim = 64, .kind = plan::AttentionKind::kEager});
    const Result exact = exactly(problem), got = compute(problem);
    // Scores are rounded, too, before the softmax.
    EXPECT_LT(test::relative_error(got.output, exact.output), 2 * bound_of(type()));
    EXPECT_LT(test::relative_error(got.d_qkv, exact.d_qkv), 2 * bound_of(type()));
    for (int round = 0; round < 5; ++round) EXPECT_TRUE(at::equal(compute(problem).d_qkv, got.d_qkv));
  }
}

TEST_P(GpuAttention, RepeatsItsBitsAtEveryLengthAndHeadSizeWhereItMust) {
  at::manual_seed(2);
  const kernels::Repeatable repeatable(true);
  for (const int64_t length : {64, 127, 250, 1024, 4096}) {
    for (const int64_t head_dim : {32, 64, 80, 128, 192, 256}) {
      const int64_t kv_heads =
          head_dim % 64 == 0 ? 8 : 4;  // fp32 has one backend for groups, another without
      const Problem problem(type(), 2, length, {.heads = 8, .kv_heads = kv_heads, .head_dim = head_dim});
      const AttentionBackend backend = attention_backend(at::kCUDA, type(), length, head_dim, 0.0);
      SCOPED_TRACE(fmt::format("T {}, head size {}, {}", length, head_dim, name(backend)));
      EXPECT_TRUE(repeats_bits(backend, length));
      const Result first = compute(problem);
      EXPECT_TRUE(first.d_qkv.isfinite().all().item<bool>());
      const int rounds = type() == at::kFloat && length > 1024 ? 3 : 20;  // fp32 takes its time
      for (int round = 1; round < rounds; ++round) {
        const Result again = compute(problem);
        ASSERT_TRUE(at::equal(again.output, first.output)) << round;
        ASSERT_TRUE(at::equal(again.d_qkv, first.d_qkv)) << round;
      }
    }
  }
}

TEST_P(GpuAttention, TakesGradientsOfAnyStrides) {
  at::manual_seed(5);
  for (const bool repeats : {false, true}) {
    const kernels::Repeatable repeatable(repeats);
    Problem problem(type(), 2, 96, {.heads = 4, .kv_heads = 2, .head_dim = 64});
    const at::Tensor dense = problem.d_output;
    const at::Tensor wanted = compute(problem).d_qkv;
    problem.d_output = dense.transpose(1, 2).contiguous().transpose(1, 2);
    EXPECT_TRUE(at::equal(compute(problem).d_qkv, wanted)) << "transposed";
    const at::Tensor one = at::full({}, 0.5, dense.options());
    problem.d_output = one.expand(dense.sizes());
    const at::Tensor of_expanded = compute(problem).d_qkv;
    problem.d_output = problem.d_output.contiguous();
    EXPECT_TRUE(at::equal(of_expanded, compute(problem).d_qkv)) << "one number for all";
  }
}

TEST_P(GpuAttention, RepeatsItsBitsWithDropoutWhereItMust) {
  const kernels::Repeatable repeatable(true);
  at::manual_seed(3);
  const Problem problem(type(), 2, 1024, {.heads = 8, .kv_heads = 8, .head_dim = 64});
  const auto run = [&] {
    at::manual_seed(4);
    const at::Tensor leaf = problem.qkv.detach().clone().requires_grad_(true);
    const at::Tensor output = causal_attention(leaf * 1.0, problem.shape, {}, 0.1);
    return torch::autograd::grad({output}, {leaf}, {problem.d_output})[0];
  };
  const at::Tensor first = run();
  for (int round = 1; round < 20; ++round) ASSERT_TRUE(at::equal(run(), first)) << round;
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GpuAttention, testing::Values(at::kBFloat16, at::kHalf, at::kFloat),
                         [](const auto& type) { return std::string(c10::toString(type.param)); });

}  // namespace
}  // namespace trireme::nn
