#include "trireme/train/scorer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <mutex>

#include "tests/report/temporary_folder.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/nn/init.h"
#include "trireme/plan/model_facts.h"
#include "trireme/state/state_file.h"

namespace trireme::train {
namespace {

constexpr int64_t kLength = 20;

class ScorerTest : public ::testing::Test {
 protected:
  ScorerTest() {
    plan::ModelConfig model;
    model.n_layers = 2;
    model.d_model = 16;
    model.n_heads = 2;
    model.vocab_size = 50;
    model_ = plan::complete(model, kLength);
    plain_ = nn::build(model_);
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : plain_->parameters()) parameter.normal_(0.0, 0.3);
    state::save_weights(*plain_, weights_);
  }

  /// Rows of all lengths, of which different parts are scored.
  static std::vector<ScoredTokens> rows(size_t count) {
    std::vector<ScoredTokens> made;
    for (size_t i = 0; i < count; ++i) {
      ScoredTokens row{.tokens = {}, .from = 1};
      const size_t length = 2 + i * 7 % kLength;
      for (size_t t = 0; t < length; ++t)
        row.tokens.push_back(static_cast<int32_t>((i * 13 + t * t * 5) % 50));
      row.from = 1 + i % (length - 1);
      made.push_back(row);
    }
    return made;
  }

  /// By a forward pass for each token, of its prefix alone.
  double alone(const ScoredTokens& row) const {
    const at::NoGradGuard no_grad;
    double nats = 0.0;
    for (size_t t = row.from; t < row.tokens.size(); ++t) {
      const std::vector<int64_t> prefix(row.tokens.begin(), row.tokens.begin() + static_cast<int64_t>(t));
      const at::Tensor logits = plain_->forward(at::tensor(prefix).unsqueeze(0))[0][-1].to(at::kDouble);
      nats -= at::log_softmax(logits, 0)[row.tokens[t]].item<double>();
    }
    return nats;
  }

  /// The scores that each of `ranks` threads finds.
  std::vector<std::vector<double>> score(const std::vector<ScoredTokens>& rows, int64_t ranks) const {
    std::vector<std::vector<double>> found(static_cast<size_t>(ranks));
    test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
      Scorer scorer(model_, weights_, world);
      size_t next = 0;
      found[static_cast<size_t>(world->rank())] = scorer.score([&]() -> std::optional<ScoredTokens> {
        if (next == rows.size()) return std::nullopt;
        return rows[next++];
      });
    });
    return found;
  }

  TemporaryFolder folder_;
  std::string weights_ = folder_.file("weights.safetensors");
  plan::ModelConfig model_;
  std::shared_ptr<nn::LanguageModel> plain_;
};

/// Fewer rows than ranks, fewer batches than ranks, and batches that ranks cannot share evenly.
TEST_F(ScorerTest, EachRowHasItsLikelihoodAloneOnAnyNumberOfRanks) {
  for (const size_t count : {1u, 40u, 300u}) {
    const std::vector<ScoredTokens> given = rows(count);
    for (const int64_t ranks : {1, 2, 3}) {
      for (const std::vector<double>& found : score(given, ranks)) {
        ASSERT_EQ(found.size(), count) << ranks;
        for (size_t i = 0; i < count; ++i)
          EXPECT_NEAR(found[i], alone(given[i]), 2e-6 * alone(given[i])) << "row " << i << " on " << ranks;
      }
    }
  }
}

TEST_F(ScorerTest, NothingHasNoScores) {
  for (const std::vector<double>& found : score({}, 2)) EXPECT_TRUE(found.empty());
}

TEST_F(ScorerTest, RefusesRowsOfWhichNothingCanBeScored) {
  for (const size_t from : {0u, 3u}) {
    const std::vector<ScoredTokens> given = {{.tokens = {1, 2, 3}, .from = from}};
    EXPECT_THROW(score(given, 2), LogicError) << from;
  }
}

/// A text that cannot be read fails on all ranks alike.
TEST_F(ScorerTest, AnErrorOfTheTextEndsAllRanks) {
  test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
    Scorer scorer(model_, weights_, world);
    const std::vector<ScoredTokens> given = rows(100);
    size_t next = 0;
    const auto failing = [&]() -> std::optional<ScoredTokens> {
      if (next == 90) throw DataError("[test] broken");
      return given[next++];
    };
    EXPECT_THROW(scorer.score(failing), DataError);
    next = 95;
    const auto rest = [&]() -> std::optional<ScoredTokens> {
      if (next == 100) return std::nullopt;
      return given[next++];
    };
    EXPECT_EQ(scorer.score(rest).size(), 5u) << "it can be used again";
  });
}

}  // namespace
}  // namespace trireme::train
