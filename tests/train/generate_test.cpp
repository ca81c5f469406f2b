#include "trireme/train/generate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>

#include "trireme/base/error.h"

namespace trireme::train {
namespace {

/// Always prefers the token after the last one, then the one after that, whatever came before.
class Counting : public nn::LanguageModel {
 public:
  int64_t longest = 0;

 private:
  std::vector<nn::Unit> body(const nn::Documents&) override {
    return {{"logits", [this](const at::Tensor& tokens) { return next(tokens); }}};
  }
  Head head() override {
    return {.norm = [](const at::Tensor& x) { return x; }, .weight = at::eye(10), .tied = true};
  }
  at::Tensor next(const at::Tensor& tokens) {
    longest = std::max(longest, tokens.size(1));
    at::Tensor logits = at::zeros({1, tokens.size(1), 10});
    for (int64_t t = 0; t < tokens.size(1); ++t) {
      const int64_t last = tokens[0][t].item<int64_t>();
      logits[0][t][(last + 1) % 10] = 4.0;
      logits[0][t][(last + 2) % 10] = 3.0;
    }
    return logits;
  }
};

TEST(Generate, GreedyTakesTheMostLikelyToken) {
  Counting model;
  EXPECT_EQ(generate(model, {3}, {.max_tokens = 8, .temperature = 0.0}, at::kCPU),
            (std::vector<int32_t>{4, 5, 6, 7, 8, 9, 0, 1}));
}

TEST(Generate, TopKNeverLeavesTheKMostLikely) {
  Counting model;
  int32_t last = 0;
  std::set<int32_t> steps;
  for (const int32_t token :
       generate(model, {0}, {.max_tokens = 200, .temperature = 1.0, .top_k = 2}, at::kCPU)) {
    steps.insert((token - last + 10) % 10);
    last = token;
  }
  EXPECT_EQ(steps, (std::set<int32_t>{1, 2}));
}

TEST(Generate, TakesOnlyTokensThatTheTokenizerKnows) {
  Counting model;
  for (const double temperature : {0.0, 5.0}) {
    const SamplingOptions options{.max_tokens = 300, .temperature = temperature, .vocab_size = 6};
    const std::vector<int32_t> tokens = generate(model, {3}, options, at::kCPU);
    EXPECT_LT(std::ranges::max(tokens), 6) << temperature;
    const SamplingOptions more{.max_tokens = 300, .temperature = temperature, .vocab_size = 11};
    EXPECT_EQ(std::ranges::max(generate(model, {3}, more, at::kCPU)), 9) << temperature;
  }
}

TEST(Generate, IsDeterministicInTheSeedAndFollowsTheDistribution) {
  Counting model;
  const SamplingOptions options{.max_tokens = 2000, .temperature = 1.0, .seed = 5};
  const std::vector<int32_t> first = generate(model, {0}, options, at::kCPU);
  EXPECT_EQ(first, generate(model, {0}, options, at::kCPU));
  SamplingOptions other = options;
  other.seed = 6;
  EXPECT_NE(first, generate(model, {0}, other, at::kCPU));
  int32_t last = 0;
  double nexts = 0;
  for (const int32_t token : first) {
    nexts += (token - last + 10) % 10 == 1;
    last = token;
  }
  const double expected = std::exp(4.0) / (std::exp(4.0) + std::exp(3.0) + 8.0);
  EXPECT_NEAR(nexts / 2000.0, expected, 5 * std::sqrt(expected * (1 - expected) / 2000.0));
}

TEST(Generate, ShowsTheModelNoMoreThanItsContext) {
  Counting model;
  generate(model, {1, 2, 3}, {.max_tokens = 20, .temperature = 0.0, .context = 5}, at::kCPU);
  EXPECT_EQ(model.longest, 5);
}

TEST(Generate, EndsBeforeTheEndToken) {
  Counting model;
  EXPECT_EQ(generate(model, {3}, {.max_tokens = 8, .temperature = 0.0, .end_token = 7}, at::kCPU),
            (std::vector<int32_t>{4, 5, 6}));
}

TEST(Generate, RefusesAnEmptyPrompt) {
  Counting model;
  EXPECT_THROW(generate(model, {}, {}, at::kCPU), LogicError);
}

}  // namespace
}  // namespace trireme::train
