// Documents side by side in sequences are computed as each of them alone: attention to the bit, models up to
// the rounding of products that see other numbers of rows.
#include "trireme/nn/documents.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/nn/ring_attention.h"
#include "trireme/plan/model_facts.h"

namespace trireme::nn {
namespace {

/// Lengths of the documents of each sequence.
using DocumentLengths = std::vector<std::vector<int64_t>>;

/// Odd lengths, documents of one token at both ends and inside, a sequence that is one document.
const DocumentLengths kPacked = {{1, 37, 5, 1, 1, 64, 18}, {127}, {63, 63, 1}};

Documents packed_documents(const DocumentLengths& lengths) {
  std::vector<int32_t> starts, ends = {0};
  for (const std::vector<int64_t>& sequence : lengths) {
    int32_t begin = 0;
    for (const int64_t length : sequence) {
      starts.insert(starts.end(), static_cast<size_t>(length), begin);
      begin += static_cast<int32_t>(length);
      ends.push_back(ends.back() + static_cast<int32_t>(length));
    }
  }
  ends.resize(ends.size() + 3, ends.back());  // empty documents
  return {at::tensor(starts, at::kInt).view({std::ssize(lengths), -1}), at::tensor(ends, at::kInt)};
}

/// Calls body(sequence, begin, length) for each document.
template <typename Body>
void for_each_document(const DocumentLengths& lengths, const Body& body) {
  for (size_t sequence = 0; sequence < lengths.size(); ++sequence) {
    int64_t begin = 0;
    for (const int64_t length : lengths[sequence]) {
      body(static_cast<int64_t>(sequence), begin, length);
      begin += length;
    }
  }
}

struct Attended {
  at::Tensor output, d_qkv;
};

Attended attended_by_documents(const at::Tensor& qkv, const at::Tensor& d_output, const AttentionShape& shape,
                               const RopeTable& rope, const Documents& documents, double dropout = 0.0) {
  const at::Tensor leaf = qkv.clone().requires_grad_(true);
  const at::Tensor output = attention_in_documents(leaf * 1.0, shape, rope, dropout, nullptr, documents);
  return {output.detach(), torch::autograd::grad({output}, {leaf}, {d_output})[0]};
}

struct PackedProblem {
  PackedProblem(const AttentionShape& of, at::ScalarType type) : shape(of) {
    const int64_t width = (of.heads + 2 * of.kv_heads) * of.head_dim;
    qkv = at::randn({3, 127, width}, at::kDouble).to(type);
    d_output = at::randn({3, 127, of.heads * of.head_dim}, at::kDouble).to(type);
    rope = make_rope_table(127, of.head_dim, 1e4, at::kCPU);
  }
  Attended packed(const Documents& documents) const {
    return attended_by_documents(qkv, d_output, shape, rope_in(documents, rope), documents);
  }
  /// Output and gradient of a document alone, by the attention that knows none.
  Attended alone(int64_t sequence, int64_t begin, int64_t length) const {
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, sequence, 1).narrow(1, begin, length); };
    const RopeTable table{rope.cosine.narrow(0, 0, length), rope.sine.narrow(0, 0, length)};
    return attended_by_documents(part(qkv).contiguous(), part(d_output), shape, table, {});
  }

  AttentionShape shape;
  at::Tensor qkv, d_output;
  RopeTable rope;
};

double largest(const at::Tensor& x) {
  return x.to(at::kDouble).abs().max().item<double>();
}

/// The largest difference between documents in their sequences and alone, of outputs and gradients.
double distance_from_alone(const PackedProblem& problem, const Documents& documents) {
  const Attended packed = problem.packed(documents);
  double distance = 0.0;
  for_each_document(kPacked, [&](int64_t sequence, int64_t begin, int64_t length) {
    const Attended alone = problem.alone(sequence, begin, length);
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, sequence, 1).narrow(1, begin, length); };
    distance = std::max(
        {distance, largest(part(packed.output) - alone.output), largest(part(packed.d_qkv) - alone.d_qkv)});
  });
  return distance;
}

const std::vector<AttentionShape> kShapes = {{4, 4, 8}, {4, 2, 8}, {6, 1, 16}, {2, 1, 36}};

TEST(Documents, AreAttendedToTheBitAsEachAlone) {
  at::manual_seed(1);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (const AttentionShape& shape : kShapes) {
      const PackedProblem problem(shape, type);
      EXPECT_EQ(distance_from_alone(problem, packed_documents(kPacked)), 0.0)
          << shape.heads << " heads, " << shape.kv_heads << " of keys, " << type;
    }
  }
}

TEST(Documents, OfDoublesAreMaskedAndDifferByRoundingAlone) {
  at::manual_seed(2);
  for (const AttentionShape& shape : kShapes)
    EXPECT_LT(distance_from_alone(PackedProblem(shape, at::kDouble), packed_documents(kPacked)), 1e-12);
}

TEST(Documents, ThatLeakOneTokenAreFound) {
  at::manual_seed(3);
  Documents leaking = packed_documents(kPacked);
  // The first token of the document of 37 tokens sees the document of one token before it.
  leaking.starts[0].narrow(0, 1, 37).fill_(0);
  for (const at::ScalarType type : {at::kFloat, at::kDouble})
    EXPECT_GT(distance_from_alone(PackedProblem({4, 2, 8}, type), leaking), 1e-3) << type;
}

TEST(Documents, ThatFillTheirSequencesHaveTheBitsOfNone) {
  at::manual_seed(4);
  const PackedProblem problem({4, 2, 8}, at::kFloat);
  const Attended packed = problem.packed(packed_documents({{127}, {127}, {127}}));
  const Attended plain =
      attended_by_documents(problem.qkv, problem.d_output, problem.shape, problem.rope, {});
  EXPECT_TRUE(at::equal(packed.output, plain.output));
  EXPECT_TRUE(at::equal(packed.d_qkv, plain.d_qkv));
}

TEST(Documents, KeepTheirAttentionForAPassThatIsComputedAgain) {
  at::manual_seed(5);
  const PackedProblem problem({4, 2, 8}, at::kFloat);
  const Documents documents = packed_documents(kPacked);
  const RopeTable rope = rope_in(documents, problem.rope);
  KeptAttention kept;
  const auto attended = [&] {
    return attention_in_documents(problem.qkv * 1.0, problem.shape, rope, 0.0, &kept, documents);
  };
  const at::Tensor first = attended();
  EXPECT_FALSE(kept.tensors.empty());
  EXPECT_TRUE(at::equal(attended(), first));
  EXPECT_TRUE(kept.tensors.empty());
}

TEST(Documents, AreRefusedWhereTheyAreNotThoseOfTheTokens) {
  const PackedProblem problem({4, 2, 8}, at::kFloat);
  Documents documents = packed_documents({{127}});
  EXPECT_THROW(attention_in_documents(problem.qkv * 1.0, problem.shape, {}, 0.0, nullptr, documents),
               LogicError);
  documents.starts = documents.starts.expand({3, 127}).contiguous().to(at::kLong);
  EXPECT_THROW(attention_in_documents(problem.qkv * 1.0, problem.shape, {}, 0.0, nullptr, documents),
               LogicError);
}

class DocumentsOfModel : public ::testing::TestWithParam<plan::ModelFamily> {
 protected:
  void SetUp() override {
    at::manual_seed(6);
    plan::ModelConfig config;
    config.family = GetParam();
    config.n_layers = 2;
    config.d_model = 32;
    config.vocab_size = 50;
    config.n_heads = 4;
    config.n_kv_heads = GetParam() == plan::ModelFamily::kLlama ? 2 : 4;
    config = plan::complete(config, 127);
    model_ = build(config);
    InitialWeights(config, 3).fill(*model_);
    const at::NoGradGuard no_grad;
    for (at::Tensor& weight : model_->parameters()) weight.mul_(4.0);  // so that attention counts
    tokens_ = at::randint(50, {3, 127}, at::kLong);
    targets_ = at::randint(50, {3, 127}, at::kLong);
  }

  struct Learnt {
    double loss = 0.0;
    std::vector<at::Tensor> gradients;
  };
  Learnt learnt(const at::Tensor& tokens, const at::Tensor& targets, const Documents& documents) {
    model_->zero_grad();
    const at::Tensor loss = model_->loss(tokens, {.targets = targets, .documents = documents});
    loss.backward();
    Learnt result{loss.item<double>(), {}};
    for (const at::Tensor& weight : model_->parameters()) result.gradients.push_back(weight.grad().clone());
    return result;
  }
  /// The mean over documents, each alone, by their tokens.
  Learnt learnt_alone() {
    Learnt sum;
    for_each_document(kPacked, [&](int64_t sequence, int64_t begin, int64_t length) {
      const auto part = [&](const at::Tensor& x) {
        return x.narrow(0, sequence, 1).narrow(1, begin, length).contiguous();
      };
      const Learnt one = learnt(part(tokens_), part(targets_), {});
      const double share = static_cast<double>(length) / static_cast<double>(tokens_.numel());
      sum.loss += share * one.loss;
      if (sum.gradients.empty())
        for (const at::Tensor& gradient : one.gradients) sum.gradients.push_back(at::zeros_like(gradient));
      for (size_t i = 0; i < one.gradients.size(); ++i) sum.gradients[i].add_(one.gradients[i], share);
    });
    return sum;
  }
  /// The relative distance of all gradients.
  static double difference_of(const Learnt& one, const Learnt& other) {
    double difference = 0.0, size = 0.0;
    for (size_t i = 0; i < one.gradients.size(); ++i) {
      difference += (one.gradients[i] - other.gradients[i]).to(at::kDouble).square().sum().item<double>();
      size += other.gradients[i].to(at::kDouble).square().sum().item<double>();
    }
    return std::sqrt(difference / size);
  }

  std::shared_ptr<LanguageModel> model_;
  at::Tensor tokens_, targets_;
};

TEST_P(DocumentsOfModel, AreLearntAsEachAlone) {
  const Learnt packed = learnt(tokens_, targets_, packed_documents(kPacked)), alone = learnt_alone();
  EXPECT_NEAR(packed.loss, alone.loss, 1e-6 * alone.loss);
  EXPECT_LT(difference_of(packed, alone), 1e-6);
  const Learnt together = learnt(tokens_, targets_, {});
  EXPECT_GT(std::abs(together.loss - alone.loss), 1e-3);
  EXPECT_GT(difference_of(together, alone), 1e-2);
}

TEST_P(DocumentsOfModel, HaveTheLogitsOfEachAlone) {
  const at::NoGradGuard no_grad;
  const at::Tensor packed = model_->forward(tokens_, packed_documents(kPacked));
  for_each_document(kPacked, [&](int64_t sequence, int64_t begin, int64_t length) {
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, sequence, 1).narrow(1, begin, length); };
    const at::Tensor alone = model_->forward(part(tokens_).contiguous());
    EXPECT_LT(largest(part(packed) - alone), 1e-6 * largest(alone) + 1e-6) << sequence << " at " << begin;
  });
}

TEST_P(DocumentsOfModel, ThatLeakOneTokenAreLearntOtherwise) {
  Documents leaking = packed_documents(kPacked);
  leaking.starts[0].narrow(0, 1, 37).fill_(0);
  EXPECT_GT(difference_of(learnt(tokens_, targets_, leaking), learnt_alone()), 1e-4);
}

TEST_P(DocumentsOfModel, ThatFillTheirSequencesHaveTheBitsOfNone) {
  const Learnt packed = learnt(tokens_, targets_, packed_documents({{127}, {127}, {127}}));
  const Learnt plain = learnt(tokens_, targets_, {});
  EXPECT_EQ(packed.loss, plain.loss);
  for (size_t i = 0; i < plain.gradients.size(); ++i)
    EXPECT_TRUE(at::equal(packed.gradients[i], plain.gradients[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(Models, DocumentsOfModel,
                         ::testing::Values(plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama),
                         [](const auto& family) { return std::string(plan::name(family.param)); });

class LonelyRing : public RingContext {
 public:
  LonelyRing() : RingContext({.rank = 0, .ranks = 1, .zigzag = true}) {}
  Arrival pass_on(const at::Tensor&, at::Tensor&) const override {
    return [] {};
  }
};

TEST(Documents, AreRefusedByARing) {
  const PackedProblem problem({4, 2, 8}, at::kFloat);
  const auto ring = std::make_shared<LonelyRing>();
  EXPECT_THROW(attention_in_context(problem.qkv * 1.0, problem.shape, {}, 0.0, nullptr, ring,
                                    packed_documents(kPacked)),
               LogicError);
}

}  // namespace
}  // namespace trireme::nn
