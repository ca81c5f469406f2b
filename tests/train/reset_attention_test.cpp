// Runs that keep documents apart (data.reset_attention): the loss is that of each document alone, and however
// a run is split, saved or computed again, it is the same run.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "tests/train/resume_fixture.h"
#include "trireme/base/error.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/train/program.h"
#include "trireme/train/run_data.h"

namespace trireme::train {
namespace {

class ResetAttention : public Resume {
 protected:
  void SetUp() override {
    Resume::SetUp();
    std::ofstream text(folder_ / "documents.txt");
    for (int i = 0; i < 300; ++i) {
      text << std::string(static_cast<size_t>(1 + i * 11 % 41), static_cast<char>('a' + i * 7 % 23))
           << "\n<|endoftext|>\n";
    }
    config_.data.path = (folder_ / "documents.txt").string();
    config_.data.reset_attention = true;
    config_.model.n_heads = config_.model.n_kv_heads = 4;
    config_.model.d_ff = 56;
    config_.train = {
        .steps = 6, .global_batch = 8, .micro_batch = 8, .grad_clip = 0.5, .val_every = 3, .val_batches = 2};
    config_.checkpoint.every = 0;
  }

  void use_grouped_llama() {
    config_.model.family = plan::ModelFamily::kLlama;
    config_.model.n_kv_heads = 2;
  }

  data::Batch first_batch() {
    const auto data = open_run_data(options(), {});
    return data->feed({.global_batch = 8, .micro_batch = 8})();
  }

  /// By the weights that a run begins with: of each document alone, by the targets that count. A document
  /// goes up to the next place where begins(row, place) holds.
  using Begins = std::function<bool(int64_t row, int64_t place)>;
  double loss_of_documents_alone(const data::Batch& batch, const Begins& begins) {
    const auto model = nn::build(config_.model);
    nn::InitialWeights(config_.model, static_cast<uint64_t>(config_.seed)).fill(*model);
    const at::NoGradGuard no_grad;
    double sum = 0.0, counted = 0.0;
    for (int64_t row = 0; row < batch.inputs.size(0); ++row) {
      for (int64_t begin = 0, end = 1; end <= batch.inputs.size(1); ++end) {
        if (end < batch.inputs.size(1) && !begins(row, end)) continue;
        const auto part = [&, begin](const at::Tensor& x) {
          return x.narrow(0, row, 1).narrow(1, begin, end - begin).contiguous();
        };
        const double count = part(batch.targets).ne(data::kIgnoredTarget).sum().item<double>();
        if (count > 0) sum += count * model->loss(part(batch.inputs), part(batch.targets)).item<double>();
        counted += count;
        begin = end;
      }
    }
    return sum / counted;
  }
  double loss_of_texts_alone(const data::Batch& batch) {
    return loss_of_documents_alone(
        batch, [&](int64_t row, int64_t place) { return batch.inputs[row][place - 1].item<int64_t>() == 0; });
  }

  struct Ran {
    std::vector<StepRecord> steps;
    RunSummary summary;
  };
  Ran ran(int64_t ranks, bool resume = false, int64_t stop_at = 0) {
    Resume::run(ranks, resume, stop_at);
    return {recorder_.steps, recorder_.summary};
  }

  static void expect_near(const Ran& got, const Ran& wanted, const std::string& what) {
    ASSERT_EQ(got.steps.size(), wanted.steps.size()) << what;
    for (size_t i = 0; i < wanted.steps.size(); ++i) {
      EXPECT_NEAR(got.steps[i].loss, wanted.steps[i].loss, 1e-5 * wanted.steps[i].loss) << what << " " << i;
      EXPECT_NEAR(got.steps[i].grad_norm, wanted.steps[i].grad_norm, 1e-4 * wanted.steps[i].grad_norm)
          << what << " " << i;
    }
    EXPECT_NEAR(*got.summary.final_val_loss, *wanted.summary.final_val_loss,
                1e-5 * *wanted.summary.final_val_loss)
        << what;
  }
};

TEST_F(ResetAttention, BeginsWithTheLossOfEachDocumentAlone) {
  for (const plan::ModelFamily family : {plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama}) {
    if (family == plan::ModelFamily::kLlama) use_grouped_llama();
    const data::Batch batch = first_batch();
    EXPECT_GE(batch.inputs.eq(0).sum().item<int64_t>(), 8);  // several documents
    EXPECT_GT(batch.inputs.select(1, 0).ne(0).sum().item<int64_t>(), 0);
    const double wanted = loss_of_texts_alone(batch);
    EXPECT_NEAR(ran(1).steps.front().loss, wanted, 1e-6 * wanted) << plan::name(family);
    config_.data.reset_attention = false;
    EXPECT_GT(std::abs(ran(1).steps.front().loss - wanted), 1e-5 * wanted) << plan::name(family);
    config_.data.reset_attention = true;
  }
}

/// Conversations of two turns, whose template writes no token that would end them.
TEST_F(ResetAttention, OfConversationsBeginsWithTheLossOfEachAlone) {
  std::ofstream(folder_ / "chat.jinja")
      << "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
         "{% if add_generation_prompt %}<assistant>{% endif %}";
  std::ofstream lines(folder_ / "chats.jsonl");
  const auto turn = [&](const char* role, const std::string& text) {
    return fmt::format(R"({{"role": "{}", "content": "{}"}})", role, text);
  };
  for (int i = 0; i < 120; ++i) {
    const std::string word(static_cast<size_t>(1 + i * 5 % 13), static_cast<char>('a' + i % 20));
    lines << fmt::format("{{\"messages\": [{}, {}, {}, {}]}}\n", turn("user", "?" + word),
                         turn("assistant", word), turn("user", "on"), turn("assistant", word + word));
  }
  lines.close();
  config_.data.path = (folder_ / "chats.jsonl").string();
  config_.data.format = plan::DataFormat::kChat;
  config_.data.chat_template = (folder_ / "chat.jinja").string();
  config_.data.seq_len = config_.model.max_seq_len = 256;
  use_grouped_llama();
  const data::Batch batch = first_batch();
  int64_t conversations = 0;
  const double wanted = loss_of_documents_alone(batch, [&](int64_t row, int64_t place) {
    const auto is = [&](int64_t at, char letter) {
      return at < 256 && batch.inputs[row][at].item<int64_t>() == letter;
    };
    const bool fills = is(place, 0) && !is(place - 1, 0);
    const bool begins = is(place, '<') && is(place + 1, 'u') && is(place + 6, '?');
    conversations += begins ? 1 : 0;
    return begins || fills;
  });
  EXPECT_GT(conversations, 4);
  EXPECT_NEAR(ran(1).steps.front().loss, wanted, 1e-6 * wanted);
  config_.data.reset_attention = false;
  EXPECT_GT(std::abs(ran(1).steps.front().loss - wanted), 1e-5 * wanted);
}

TEST_F(ResetAttention, ChangesWhatIsLearntAndWhatIsMeasured) {
  const Ran apart = ran(1);
  config_.data.reset_attention = false;
  const Ran together = ran(1);
  EXPECT_NE(apart.summary.weights_digest, together.summary.weights_digest);
  EXPECT_NE(apart.steps.back().loss, together.steps.back().loss);
  config_.optim.lr = config_.optim.min_lr = 1e-30;  // validation alone sees the difference
  const double plain = *ran(1).summary.final_val_loss;
  config_.data.reset_attention = true;
  EXPECT_GT(std::abs(*ran(1).summary.final_val_loss - plain), 1e-6 * plain);
}

TEST_F(ResetAttention, HasOneDigestUnderEveryPolicyAndRecomputation) {
  use_grouped_llama();
  config_.train.micro_batch = 2;
  const std::string wanted = ran(2).summary.weights_digest;
  for (const plan::PolicyName policy : {plan::PolicyName::kDdp, plan::PolicyName::kZero1,
                                        plan::PolicyName::kZero2, plan::PolicyName::kFsdp}) {
    config_.parallel.policy = policy;
    EXPECT_EQ(ran(2).summary.weights_digest, wanted) << plan::name(policy);
  }
  for (const plan::Recompute recompute :
       {plan::Recompute::kBlock, plan::Recompute::kAllButAttention, plan::Recompute::kCheap}) {
    config_.memory.recompute = recompute;
    EXPECT_EQ(ran(2).summary.weights_digest, wanted) << plan::name(recompute);
  }
}

TEST_F(ResetAttention, OfMicroBatchesIsThatOfWholeBatches) {
  const Ran whole = ran(1);
  config_.train.micro_batch = 2;
  expect_near(ran(1), whole, "accumulation");
}

TEST_F(ResetAttention, InStagesIsThatOfOneRank) {
  config_.model.n_layers = 4;
  config_.train.micro_batch = 2;
  for (const plan::ModelFamily family : {plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama}) {
    if (family == plan::ModelFamily::kLlama) use_grouped_llama();
    config_.parallel.pp = 1;
    const Ran whole = ran(1);
    config_.parallel.pp = 2;
    expect_near(ran(2), whole, std::string(plan::name(family)) + " in two stages");
    config_.memory.recompute = plan::Recompute::kBlock;
    expect_near(ran(2), whole, std::string(plan::name(family)) + " in two stages, computed again");
    config_.memory.recompute = plan::Recompute::kNone;
  }
  config_.parallel.pp = 3;
  config_.model.tie_embeddings = false;
  const Ran three = ran(3);
  config_.parallel.pp = 1;
  expect_near(three, ran(1), "three stages");
}

TEST_F(ResetAttention, OfSplitTokensAndLayersIsThatOfOneRank) {
  for (const plan::ModelFamily family : {plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama}) {
    if (family == plan::ModelFamily::kLlama) use_grouped_llama();
    config_.parallel = {};
    const Ran whole = ran(1);
    config_.parallel.tp = 2;
    expect_near(ran(2), whole, std::string(plan::name(family)) + " over tp");
    config_.parallel = {};
    config_.parallel.cp = 2;  // of kind auto, which is Ulysses then
    expect_near(ran(2), whole, std::string(plan::name(family)) + " over cp");
    config_.parallel.tp = 2;
    expect_near(ran(4), whole, std::string(plan::name(family)) + " over tp and cp");
  }
}

TEST_F(ResetAttention, InBf16StaysNearFp32) {
  const Ran exact = ran(1);
  config_.precision.compute = plan::Dtype::kBf16;
  const Ran rounded = ran(1);
  EXPECT_NEAR(rounded.steps.front().loss, exact.steps.front().loss, 1e-2 * exact.steps.front().loss);
  EXPECT_LT(rounded.steps.back().loss, rounded.steps.front().loss);
}

TEST_F(ResetAttention, DropsWeightsOfAttentionWithinDocuments) {
  config_.model.dropout = 0.1;
  const Ran dropped = ran(1);
  EXPECT_LT(dropped.steps.back().loss, dropped.steps.front().loss);
  config_.parallel.policy = plan::PolicyName::kFsdp;
  config_.memory.recompute = plan::Recompute::kBlock;
  EXPECT_EQ(ran(1).summary.weights_digest, dropped.summary.weights_digest);
}

TEST_F(ResetAttention, GoesOnExactlyAndNotOtherwise) {
  config_.train.micro_batch = 2;
  config_.checkpoint.every = 2;
  const std::string wanted = ran(2).summary.weights_digest;
  std::filesystem::remove_all(checkpoints());
  ran(2, false, 3);
  EXPECT_EQ(ran(2, true).summary.weights_digest, wanted);
  std::filesystem::remove_all(checkpoints());
  ran(2, false, 3);
  config_.data.reset_attention = false;
  try {
    ran(2, true);
    FAIL() << "it goes on as another run";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("data.reset_attention"), std::string::npos) << error.what();
  }
}

/// Documents of three tokens that token 9 ends, if it says so.
class TokensOfProgram : public data::TokenSamples {
 public:
  TokensOfProgram(int64_t length, bool says_end) : length_(length), says_end_(says_end) {}
  int64_t size() const override { return 64; }
  int64_t seq_len() const override { return length_; }
  uint64_t digest() const override { return 1; }
  void read(int64_t index, std::span<int64_t> tokens) const override {
    for (size_t i = 0; i < tokens.size(); ++i)
      tokens[i] = i % 3 == 2 ? 9 : (index + static_cast<int64_t>(i)) % 8;
  }
  std::optional<int64_t> end_token() const override {
    return says_end_ ? std::optional<int64_t>(9) : std::nullopt;
  }

 private:
  int64_t length_;
  bool says_end_;
};

TEST_F(ResetAttention, OfAProgramWantsToKnowItsEndToken) {
  const auto open = [&](bool says_end) {
    return make_run_data(config_, {.train = std::make_shared<TokensOfProgram>(config_.data.seq_len, says_end),
                                   .vocab_size = 10});
  };
  const data::Batch batch = open(true)->feed({.global_batch = 2, .micro_batch = 2})();
  EXPECT_EQ(batch.documents.starts[0][8].item<int32_t>(), 6);
  try {
    open(false);
    FAIL() << "no token ends documents";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("TokenSamples::end_token()"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace trireme::train
