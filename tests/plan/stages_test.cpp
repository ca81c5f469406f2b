// Where a model is cut into stages, against counting by hand and trying all cuts.
#include "trireme/plan/stages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/plan/presets.h"
#include "trireme/plan/schedule.h"
#include "trireme/plan/simulate.h"

namespace trireme::plan {
namespace {

double efficiency_of(const StageSplit& split, int64_t micro_batches) {
  PassCosts costs;
  costs.forward = costs.backward_input = costs.backward_weight = split.flops;
  const auto stages = static_cast<int64_t>(split.flops.size());
  return simulate(make_schedule(ScheduleName::k1F1B, {stages, micro_batches, 1}), costs).efficiency();
}

/// 8 layers of 1024 and a head over 50,257 tokens, which costs as much as 4.09 layers.
struct MiniGpt {
  ModelConfig model = complete(find_preset("mini-gpt-153m").model, 1);
  ModelFacts facts = describe(model, 1);
};

TEST(Stages, TheHeadOfASmallModelCostsAsMuchAsFourOfItsLayers) {
  const MiniGpt mini;
  const auto parts = stage_parts(mini.model, mini.facts);
  ASSERT_EQ(parts.size(), 9u);
  EXPECT_NEAR(parts.back().flops / parts.front().flops, 4.09, 0.01);
  int64_t params = 0;
  double flops = 0.0;
  for (const StagePart& part : parts) {
    params += part.params;
    flops += part.flops;
  }
  EXPECT_NEAR(flops, mini.facts.flops_per_token / 3.0, 1e-6 * flops);
  EXPECT_EQ(params, mini.facts.params + mini.model.vocab_size * mini.model.d_model) << "tied: a copy";
}

TEST(Stages, CuttingByCostBeatsCuttingEvenly) {
  const MiniGpt mini;
  const auto parts = stage_parts(mini.model, mini.facts);
  const StageSplit even = split_evenly(parts, 4), best = split_by_cost(parts, 4);
  EXPECT_EQ(even.first, (std::vector<int64_t>{0, 2, 4, 6, 9}));
  EXPECT_NEAR(efficiency_of(even, 8), 0.442, 0.001);
  EXPECT_EQ(best.first[3], 8) << "the head has a stage of its own";
  EXPECT_NEAR(efficiency_of(best, 8), 0.594, 0.005);
  const auto blocks = stage_parts(mini.model, mini.facts, /*spread_head=*/true);
  EXPECT_NEAR(efficiency_of(split_by_cost(blocks, 4, head_flops(mini.model)), 8), 24.0 / 33.0, 1e-6);
}

/// The smallest possible largest stage, by trying all cuts.
double smallest_of_all(const std::vector<StagePart>& parts, size_t begin, int64_t stages) {
  double sum = 0.0, best = 1e300;
  for (size_t end = begin + 1; end <= parts.size(); ++end) {
    sum += parts[end - 1].flops;
    if (stages == 1) {
      if (end == parts.size()) return sum;
      continue;
    }
    if (static_cast<int64_t>(parts.size() - end) < stages - 1) break;
    best = std::min(best, std::max(sum, smallest_of_all(parts, end, stages - 1)));
  }
  return best;
}

TEST(Stages, NoOtherCutHasASmallerLargestStage) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    std::vector<StagePart> parts;
    uint64_t state = seed;
    for (size_t part = 0; part < 3 + seed % 8; ++part) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      parts.push_back({"part", static_cast<double>(1 + (state >> 33) % 9), 0});
    }
    for (int64_t stages = 1; stages <= static_cast<int64_t>(parts.size()); ++stages) {
      const StageSplit split = split_by_cost(parts, stages);
      ASSERT_EQ(split.flops.size(), static_cast<size_t>(stages));
      EXPECT_EQ(*std::ranges::max_element(split.flops), smallest_of_all(parts, 0, stages));
      EXPECT_TRUE(std::ranges::is_sorted(split.first));
      EXPECT_EQ(split.first.back(), static_cast<int64_t>(parts.size()));
    }
    EXPECT_THROW(split_by_cost(parts, static_cast<int64_t>(parts.size()) + 1), ConfigError);
    EXPECT_THROW(split_by_cost(parts, 0), ConfigError);
  }
}

}  // namespace
}  // namespace trireme::plan
