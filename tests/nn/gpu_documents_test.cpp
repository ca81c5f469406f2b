// Attention within documents on a GPU, by tables that the host does not read: output and gradients against
// the formula in double, and the same bits every time where that is asked for. Skipped without a GPU.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "tests/support/relative_error.h"
#include "trireme/data/document_table.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/repeatable.h"
#include "trireme/nn/documents.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/plan/model_facts.h"

namespace trireme::nn {
namespace {

constexpr int64_t kEnd = 0;

/// Tokens (B, T) of which about one in `every` ends a document, and the first of all does.
at::Tensor tokens_with_ends(int64_t batch, int64_t length, int64_t every) {
  const at::Tensor tokens = at::randint(1, 50, {batch, length}, at::kLong);
  at::Tensor made = tokens.masked_fill(at::randint(every, {batch, length}, at::kLong).eq(0), kEnd);
  made[0][0] = kEnd;
  return made;
}

Documents documents_of_tokens(const at::Tensor& tokens) {
  const data::DocumentTable table = data::document_table(tokens, kEnd);
  return Documents{table.starts, table.ends}.to(at::kCUDA);
}

struct DocumentProblem {
  DocumentProblem(at::ScalarType type, int64_t batch, int64_t length, const AttentionShape& of, int64_t every)
      : shape(of), documents(documents_of_tokens(tokens_with_ends(batch, length, every))) {
    const int64_t width = (of.heads + 2 * of.kv_heads) * of.head_dim;
    rope = rope_in(documents, make_rope_table(length, of.head_dim, 1e4, at::kCUDA));
    qkv = at::randn({batch, length, width}, at::TensorOptions(at::kCUDA)).to(type);
    d_output = at::randn({batch, length, of.heads * of.head_dim}, at::TensorOptions(at::kCUDA)).to(type);
  }
  AttentionShape shape;
  Documents documents;
  RopeTable rope;
  at::Tensor qkv, d_output;
};

struct DocumentResult {
  at::Tensor output, d_qkv;
};

DocumentResult attended(const DocumentProblem& problem, at::ScalarType type) {
  const at::Tensor leaf = problem.qkv.to(type, false, /*copy=*/true).requires_grad_(true);
  const at::Tensor output =
      attention_in_documents(leaf * 1.0, problem.shape, problem.rope, 0.0, nullptr, problem.documents);
  const auto grads = torch::autograd::grad({output}, {leaf}, {problem.d_output.to(type)});
  return {output.detach(), grads[0]};
}

class GpuDocuments : public testing::TestWithParam<at::ScalarType> {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  }
  at::ScalarType type() const { return GetParam(); }
  /// The bound of attention without documents: twice the spacing of numbers near 1.
  double bound() const {
    if (type() == at::kBFloat16) return 2 * 0x1.0p-8;
    return type() == at::kHalf ? 2 * 0x1.0p-11 : 1e-5;
  }
};

TEST_P(GpuDocuments, AreAttendedToByTheFormula) {
  at::manual_seed(1);
  for (const int64_t length : {127, 1024, 4096}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t every : {16, 400}) {
        const DocumentProblem problem(type(), 2, length, {.heads = 4, .kv_heads = 2, .head_dim = head_dim},
                                      every);
        const DocumentResult exact = attended(problem, at::kDouble);  // under a mask
        for (const bool repeats : {false, true}) {
          SCOPED_TRACE(
              fmt::format("T {}, head size {}, one in {}, repeats {}", length, head_dim, every, repeats));
          const kernels::Repeatable repeatable(repeats);
          const DocumentResult got = attended(problem, type());
          EXPECT_LT(test::relative_error(got.output, exact.output), bound());
          EXPECT_LT(test::relative_error(got.d_qkv, exact.d_qkv), 2 * bound());
        }
      }
    }
  }
}

TEST_P(GpuDocuments, ThatLeakOneTokenAreFound) {
  at::manual_seed(2);
  DocumentProblem problem(type(), 1, 256, {.heads = 4, .kv_heads = 2, .head_dim = 64}, 1000000);
  const DocumentResult exact = attended(problem, at::kDouble);
  at::Tensor tokens = at::ones({1, 256}, at::kLong);
  tokens[0][0] = tokens[0][100] = kEnd;
  problem.documents = documents_of_tokens(tokens);
  const DocumentResult cut = attended(problem, type());
  EXPECT_GT(test::relative_error(cut.output, exact.output), 10 * bound());
  EXPECT_GT(test::relative_error(cut.d_qkv, exact.d_qkv), 10 * bound());
}

TEST_P(GpuDocuments, RepeatTheirBitsWhereTheyMust) {
  at::manual_seed(3);
  const kernels::Repeatable repeatable(true);
  for (const int64_t length : {250, 1024, 4096}) {
    for (const int64_t head_dim : {64, 80, 128, 256}) {
      if (type() == at::kFloat && length > 1024) continue;  // under a mask it takes its time
      const DocumentProblem problem(type(), 2, length, {.heads = 8, .kv_heads = 4, .head_dim = head_dim},
                                    300);
      SCOPED_TRACE(fmt::format("T {}, head size {}", length, head_dim));
      const DocumentResult first = attended(problem, type());
      EXPECT_TRUE(first.d_qkv.isfinite().all().item<bool>());
      for (int round = 1; round < 10; ++round) {
        const DocumentResult again = attended(problem, type());
        ASSERT_TRUE(at::equal(again.output, first.output)) << round;
        ASSERT_TRUE(at::equal(again.d_qkv, first.d_qkv)) << round;
      }
    }
  }
}

/// The size of a table changes no bit: the documents that it has more are empty.
TEST_P(GpuDocuments, WithEmptyOnesBehindThemHaveTheSameBits) {
  at::manual_seed(4);
  const kernels::Repeatable repeatable(true);
  DocumentProblem problem(type(), 2, 512, {.heads = 4, .kv_heads = 2, .head_dim = 64}, 60);
  const DocumentResult wanted = attended(problem, type());
  const at::Tensor last = problem.documents.ends.narrow(0, problem.documents.ends.size(0) - 1, 1);
  problem.documents.ends = at::cat({problem.documents.ends, last.expand({128})}).contiguous();
  const DocumentResult got = attended(problem, type());
  EXPECT_TRUE(at::equal(got.output, wanted.output));
  EXPECT_TRUE(at::equal(got.d_qkv, wanted.d_qkv));
}

TEST_P(GpuDocuments, OfModelsHaveTheLossOfTheCpu) {
  for (const plan::ModelFamily family : {plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama}) {
    at::manual_seed(5);
    plan::ModelConfig config;
    config.family = family;
    config.n_layers = 2;
    config.d_model = 128;
    config.n_heads = 4;
    config.n_kv_heads = family == plan::ModelFamily::kLlama ? 2 : 4;
    config.vocab_size = 50;
    config = plan::complete(config, 250);
    const at::Tensor tokens = tokens_with_ends(3, 250, 40), targets = at::randint(50, {3, 250}, at::kLong);
    const Documents documents = documents_of_tokens(tokens);
    const auto loss_on = [&](at::Device device, at::ScalarType dtype) {
      const auto model = build(config);
      InitialWeights(config, 3).fill(*model);
      model->to(device, dtype);
      const Documents there{documents.starts.to(device), documents.ends.to(device)};
      const at::Tensor loss =
          model->loss(tokens.to(device), {.targets = targets.to(device), .documents = there});
      loss.backward();
      return loss.item<double>();
    };
    const double wanted = loss_on(at::kCPU, at::kFloat);
    EXPECT_NEAR(loss_on(at::kCUDA, type()), wanted, bound() * wanted) << plan::name(family);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GpuDocuments, testing::Values(at::kBFloat16, at::kHalf, at::kFloat),
                         [](const auto& type) { return std::string(c10::toString(type.param)); });

}  // namespace
}  // namespace trireme::nn
