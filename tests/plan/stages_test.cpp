// Where a model is cut into stages, against counting by hand and trying all cuts.
#include "trireme/plan/stages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
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

TEST(Stages, HalvesOfBlocksHaveAllOfTheModelOnce) {
  for (const char* preset : {"mini-gpt-153m", "llama-1b", "gpt2-124m"}) {
    const ModelConfig model = complete(find_preset(preset).model, 512);
    const ModelFacts facts = describe(model, 512);
    const auto parts = stage_parts(model, facts, false, CutAt::kHalves);
    ASSERT_EQ(std::ssize(parts), 2 * model.n_layers + 1);
    double flops = 0.0;
    for (const StagePart& part : parts) flops += part.flops;
    EXPECT_NEAR(flops, facts.flops_per_token / 3.0, 1e-6 * flops);
    for (int64_t stages = 1; stages <= std::ssize(parts); ++stages) {
      const StageSplit split = split_by_cost(parts, stages);
      std::multiset<std::string> held, wanted;
      for (const UnitSpec& unit : stage_units(model, facts, {0, model.n_layers + 2})) {
        for (const ParamSpec& param : unit.params) wanted.insert(param.name);
      }
      if (model.tie_embeddings && stages > 1) wanted.insert(facts.units.front().params.front().name);
      for (int64_t stage = 0; stage < stages; ++stage) {
        const UnitRange range = units_of_stage(split, stage);
        EXPECT_LT(range.first, range.end);
        for (const UnitSpec& unit : stage_units(model, facts, range)) {
          for (const ParamSpec& param : unit.params) held.insert(param.name);
        }
      }
      EXPECT_EQ(held, wanted) << preset << " in " << stages;
    }
  }
}

/// There and back over two ranks, of which one has the head: no other cut gives the busier rank less.
TEST(Stages, RanksWithSeveralStagesAreBalancedTogether) {
  int64_t better = 0;
  for (int64_t layers = 6; layers <= 14; ++layers) {
    ModelConfig model = find_preset("llama-8b").model;
    model.n_layers = layers;
    model.vocab_size = 32000;
    model = complete(model, 4096);
    const auto parts = stage_parts(model, describe(model, 4096), false, CutAt::kHalves);
    const auto count = std::ssize(parts);
    const auto busier = [&](int64_t first, int64_t last) {
      double all = 0.0, outer = 0.0;
      for (int64_t part = 0; part < count; ++part) {
        const double flops = parts[static_cast<size_t>(part)].flops;
        all += flops;
        if (part < first || part >= last) outer += flops;
      }
      return std::max(outer, all - outer);
    };
    double least = 1e300;
    for (int64_t first = 1; first + 1 < count; ++first) {
      for (int64_t last = first + 2; last < count; ++last) least = std::min(least, busier(first, last));
    }
    const StageSplit balanced = split_by_cost(parts, 4, 0.0, {0, 1, 1, 0}),
                     by_stage = split_by_cost(parts, 4);
    EXPECT_LE(busier(balanced.first[1], balanced.first[3]), 1.005 * least) << layers;
    better +=
        busier(balanced.first[1], balanced.first[3]) < busier(by_stage.first[1], by_stage.first[3]) ? 1 : 0;
  }
  EXPECT_GT(better, 0);
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
