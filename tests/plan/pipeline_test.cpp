// What a config says of pipelines: micro-batches, schedule and stages, and what of it is refused.
#include "trireme/plan/pipeline.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/plan/cut_work.h"
#include "trireme/plan/notes.h"
#include "trireme/plan/presets.h"

namespace trireme::plan {
namespace {

Config config_with(std::vector<std::string> overrides) {
  return load({.overrides = std::move(overrides)}, Environment()).config;
}

PipelinePlan plan_of(const Config& config, int64_t ranks) {
  return plan_pipeline(config, plan_batch(config, MeshShape::fit(config.parallel, ranks)));
}

std::string refusal(const std::vector<std::string>& overrides, int64_t ranks) {
  try {
    plan_of(config_with(overrides), ranks);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

BatchPlan batch_of(const std::vector<std::string>& overrides, int64_t ranks) {
  const Config config = config_with(overrides);
  return plan_batch(config, MeshShape::fit(config.parallel, ranks));
}

TEST(PipelinePlan, MicroBatchesComeFromWhateverTheUserSaid) {
  // global_batch is 16.
  EXPECT_EQ(batch_of({"parallel.pp=2"}, 2).accumulation, 8) << "four times as many as ranks";
  EXPECT_EQ(batch_of({"parallel.pp=2"}, 4).accumulation, 8) << "of one sequence each";
  EXPECT_EQ(batch_of({"parallel.pp=3", "train.global_batch=10"}, 3).accumulation, 10);
  EXPECT_EQ(batch_of({"parallel.pp=3", "train.global_batch=30"}, 3).accumulation, 6)
      << "a multiple of the ranks is preferred";
  EXPECT_EQ(batch_of({"parallel.pp=2", "train.micro_batch=4"}, 2).accumulation, 4);
  EXPECT_EQ(batch_of({"parallel.pp=2", "pipeline.micro_batches=2"}, 2).micro_batch, 8);
  EXPECT_EQ(batch_of({"parallel.pp=2", "pipeline.micro_batches=2"}, 4).micro_batch, 4);
  EXPECT_EQ(batch_of({"pipeline.micro_batches=2"}, 2).accumulation, 1) << "there is no pipeline";
  for (const std::string& note : notes(config_with({"pipeline.micro_batches=2"}), Device::kCpu))
    EXPECT_NE(note.find("pipeline.micro_batches has no effect with parallel.pp=1"), std::string::npos);
}

TEST(PipelinePlan, RefusesMicroBatchesThatDoNotFit) {
  test::expect_mentions(
      refusal({"parallel.pp=2", "pipeline.micro_batches=5"}, 2),
      {"5 micro-batches do not divide the 16 sequences", "4 or 8", "train.global_batch to 15 or 20"});
  test::expect_mentions(refusal({"parallel.pp=2", "pipeline.micro_batches=4", "train.micro_batch=2"}, 2),
                        {"micro_batch 2 x 8 micro-batches", "the pipeline has 4", "train.global_batch to 8"});
  test::expect_mentions(
      refusal(
          {"parallel.pp=4", "pipeline.schedule=dualpipe_v", "pipeline.micro_batches=4", "model.n_layers=8"},
          4),
      {"dualpipe_v needs at least 8 micro-batches", "there are 4", "pipeline.micro_batches"});
  test::expect_mentions(refusal({"parallel.pp=2"}, 3), {"pp=2", "does not divide the world size 3"});
}

TEST(PipelinePlan, RefusesMoreStagesThanThereAreParts) {
  test::expect_mentions(refusal({"parallel.pp=8", "train.global_batch=32"}, 8),
                        {"8 stages", "4 blocks and the head", "parallel.pp=8", "model.n_layers"});
  test::expect_mentions(refusal({"parallel.pp=4", "pipeline.schedule=interleaved_1f1b"}, 4),
                        {"8 stages", "pipeline.chunks"});
}

TEST(PipelinePlan, RefusesWhatIsTooLargeBeforeItIsMade) {
  const std::vector<std::string> large = {"parallel.pp=2", "pipeline.micro_batches=1000000",
                                          "train.global_batch=1000000"};
  test::expect_mentions(
      refusal({large[0], large[1], large[2], "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=10000"},
              2),
      {"20000 stages", "4 blocks", "pipeline.chunks"});
  test::expect_mentions(refusal(large, 2),
                        {"2 stages x 1000000 micro-batches", "at most 500000", "pipeline.micro_batches"});
  test::expect_mentions(refusal({"parallel.pp=2", "pipeline.file=/dev/zero"}, 2),
                        {"/dev/zero", "more than 16777216 bytes"});
}

TEST(PipelinePlan, CutsByCostEvenlyOrAsTold) {
  const std::vector<std::string> base = {"parallel.pp=4", "model.preset=mini-gpt-153m"};
  const auto first_of = [&](const std::string& cut) {
    std::vector<std::string> overrides = base;
    if (!cut.empty()) overrides.push_back("pipeline.split=" + cut);
    return plan_of(config_with(overrides), 4).split.first;
  };
  // 8 blocks; the head costs as much as four of them (docs/pipelines.md). By cost in halves of blocks.
  const std::vector<int64_t> by_cost = first_of("");
  ASSERT_EQ(by_cost.size(), 5u);
  EXPECT_EQ(by_cost[3], 16) << "the head has a stage of its own";
  EXPECT_EQ(by_cost[4], 17);
  EXPECT_TRUE(by_cost[1] % 2 == 1 || by_cost[2] % 2 == 1) << "16 halves over three stages";
  EXPECT_EQ(first_of("even"), (std::vector<int64_t>{0, 2, 4, 6, 9}));
  EXPECT_EQ(first_of("3,3,2,0"), (std::vector<int64_t>{0, 3, 6, 8, 9}));
  test::expect_mentions(refusal({base[0], base[1], "pipeline.split=4,4"}, 4),
                        {"pipeline.split=4,4", "2 stages", "has 4"});
  test::expect_mentions(refusal({base[0], base[1], "pipeline.split=4,0,4,0"}, 4),
                        {"stage 1", "nothing to do"});
}

TEST(PipelinePlan, EveryParameterIsInOneStageAndTiedEmbeddingsInTwo) {
  for (const bool tied : {false, true}) {
    const Config config =
        config_with({"parallel.pp=3", fmt::format("model.tie_embeddings={}", tied), "train.global_batch=12"});
    const ModelFacts facts = describe(config.model, config.data.seq_len);
    const StageSplit split = plan_of(config, 3).split;
    std::vector<std::string> names, wanted;
    for (int64_t stage = 0; stage < 3; ++stage) {
      const std::vector<UnitSpec> units = stage_units(config.model, facts, units_of_stage(split, stage));
      EXPECT_EQ(units.front().name, kRootUnit);
      for (const UnitSpec& unit : units) {
        for (const ParamSpec& param : unit.params) names.push_back(param.name);
      }
    }
    for (const UnitSpec& unit : facts.units) {
      for (const ParamSpec& param : unit.params) wanted.push_back(param.name);
    }
    if (tied) wanted.push_back(facts.units.front().params.front().name);
    std::ranges::sort(names);
    std::ranges::sort(wanted);
    EXPECT_EQ(names, wanted);
  }
}

/// Of the embeddings, beside those of the first stage, where the head is tied.
TEST(PipelinePlan, EveryRowOfASpreadHeadIsInOnePart) {
  const auto expect_rows = [](int64_t vocabulary, bool tied) {
    const Config config =
        config_with({"parallel.pp=3", fmt::format("model.tie_embeddings={}", tied), "train.global_batch=12",
                     "pipeline.spread_head=true", fmt::format("model.vocab_size={}", vocabulary)});
    const ModelFacts facts = describe(config.model, config.data.seq_len);
    const std::string weight = tied ? facts.units.front().params.front().name : "lm_head.weight";
    const PipelinePlan plan = plan_of(config, 3);
    ASSERT_EQ(plan.schedule.all_stages(), 6);
    std::map<std::string, int64_t> numel, wanted;
    for (int64_t stage = 0; stage < plan.schedule.all_stages(); ++stage) {
      const UnitRange range = units_of_stage(plan.split, stage);
      const bool has_rows = plan.schedule.is_head_part(stage) || (tied && stage == 0);
      for (const UnitSpec& unit : stage_units(config.model, facts, range)) {
        for (const ParamSpec& param : unit.params) {
          EXPECT_TRUE(has_rows || param.name != weight) << stage;
          EXPECT_TRUE(param.name == weight || !plan.schedule.is_head_part(stage)) << param.name;
          numel[param.name] += param.numel();
        }
      }
    }
    for (const UnitSpec& unit : facts.units) {
      for (const ParamSpec& param : unit.params)
        wanted[param.name] = param.name == weight && tied ? 2 * param.numel() : param.numel();
    }
    EXPECT_EQ(numel, wanted);
    const auto& rows = plan.split.vocabulary;
    ASSERT_EQ(rows.size(), 4u);
    for (size_t part = 0; part < 3; ++part) {
      EXPECT_NEAR(static_cast<double>(rows[part + 1] - rows[part]), static_cast<double>(vocabulary) / 3.0,
                  vocabulary < 1024 ? 1.0 : 128.0);
      EXPECT_EQ(rows[part] % (vocabulary < 1024 ? 1 : 64), 0);
    }
  };
  for (const int64_t vocabulary : {301, 50257, 50304}) {
    for (const bool tied : {false, true}) expect_rows(vocabulary, tied);
  }
}

/// Optimizers round blocks of 8 elements of state in few bits, and a block is in one part.
TEST(PipelinePlan, PartsOfASpreadHeadBeginAtMultiplesOfEightElements) {
  EXPECT_EQ(share_rows(21, 2, 8), (std::vector<int64_t>{0, 10, 21}));
  EXPECT_EQ(share_rows(21, 2, 12), (std::vector<int64_t>{0, 10, 21}));
  EXPECT_EQ(share_rows(22, 2, 12), (std::vector<int64_t>{0, 10, 22}));
  EXPECT_EQ(share_rows(21, 2, 10), (std::vector<int64_t>{0, 8, 21}));
  EXPECT_EQ(share_rows(21, 2, 9), (std::vector<int64_t>{0, 8, 21}));
  test::expect_refusal([] { share_rows(15, 2, 9); }, {"2 ranks", "15 rows, 8 or more each"});
}

/// Rings add up elements in an order of their own for each place in a buffer.
TEST(PipelinePlan, RefusesSumsOfCopiesInDifferentOrders) {
  const auto refused = [](const char* tied, int64_t ranks) {
    return refusal({"parallel.pp=2", "train.global_batch=24", "pipeline.micro_batches=2",
                    "comm.reduction=backend", fmt::format("model.tie_embeddings={}", tied)},
                   ranks);
  };
  test::expect_mentions(refused("true", 6), {"comm.reduction=backend", "3 data-parallel ranks", "ordered"});
  EXPECT_EQ(refused("true", 4), "accepted");
  EXPECT_EQ(refused("false", 6), "accepted");
}

/// int8, topk and powersgd choose by buffer; casts and averages of parameters treat each element by itself.
TEST(PipelinePlan, RefusesHooksThatCompressCopiesDifferently) {
  const auto with_hook = [](CommHook hook, bool tied) {
    return refusal(
        {"parallel.pp=2", "train.global_batch=8", "pipeline.micro_batches=2", "parallel.policy=ddp",
         fmt::format("parallel.comm_hook={}", hook), fmt::format("model.tie_embeddings={}", tied)},
        4);
  };
  for (const CommHook hook : all_values<CommHook>()) {
    const bool by_buffer = hook == CommHook::kInt8 || hook == CommHook::kTopK || hook == CommHook::kPowerSgd;
    EXPECT_EQ(with_hook(hook, false), "accepted") << name(hook);
    if (by_buffer) {
      test::expect_mentions(with_hook(hook, true), {"drift apart", "tie_embeddings", "fp16"});
    } else {
      EXPECT_EQ(with_hook(hook, true), "accepted") << name(hook);
    }
  }
}

/// Of the rank that has most.
double most_work(const StageSplit& split, const Schedule& schedule) {
  std::vector<double> work(schedule.ranks.size());
  const std::vector<int64_t> ranks = schedule.ranks_of_stages();
  for (size_t stage = 0; stage < ranks.size(); ++stage) {
    work[static_cast<size_t>(ranks[stage])] += split.all_work(stage);
  }
  return std::ranges::max(work);
}

/// Balanced ranks alone do not make a step short: stages of one rank that are unequal hold up the others.
TEST(PipelinePlan, CutsAreMadeForTheSchedule) {
  ModelConfig model = find_preset("llama-8b").model;
  model.n_layers = 16;
  model = complete(model, 4096);
  const auto parts = stage_parts(model, describe(model, 4096), false, CutAt::kHalves);
  for (const ScheduleName name : {ScheduleName::kGpipe, ScheduleName::k1F1B, ScheduleName::kInterleaved1F1B,
                                  ScheduleName::kZbH1, ScheduleName::kZbV}) {
    for (const int64_t ranks : {2, 4, 8}) {
      const Schedule schedule = make_schedule(name, {ranks, 16, 2});
      const auto seconds = [&](const StageSplit& split) {
        return simulate(schedule, work_of_passes({schedule, split})).makespan;
      };
      const StageSplit cut = split_for(schedule, parts),
                       balanced = split_by_cost(parts, schedule.stages, 0.0, schedule.ranks_of_stages());
      const double now = seconds(cut), before = seconds(balanced);
      EXPECT_LE(now, before) << schedule.name << ", " << ranks;
      const double allowed = most_work(balanced, schedule) * (1.0 + 1e-6);
      EXPECT_LE(most_work(cut, schedule), allowed) << schedule.name << ", " << ranks;
      if (name == ScheduleName::kZbV && ranks == 4) {
        EXPECT_LT(now, 0.95 * before);
      }
      EXPECT_EQ(cut.first.front(), 0);
      EXPECT_EQ(cut.first.back(), std::ssize(parts));
      EXPECT_EQ(std::ranges::adjacent_find(cut.first, std::greater_equal()), cut.first.end());
      for (size_t moved = 1; moved + 1 < cut.first.size(); ++moved) {
        for (const int64_t by : {-1, 1}) {
          std::vector<int64_t> first = cut.first;
          first[moved] += by;
          if (std::ranges::adjacent_find(first, std::greater_equal()) != first.end()) continue;
          const StageSplit other = cut_at(first, parts, 0.0);
          if (most_work(other, schedule) > allowed) continue;
          EXPECT_GE(seconds(other), now * (1.0 - 1e-6)) << schedule.name << ", " << ranks;
        }
      }
    }
  }
}

/// Equal stages must compare as equal after any way of cuts, or the search would follow rounding.
TEST(PipelinePlan, WorkOfMovedCutsIsThatOfCutsMadeThereToTheBit) {
  ModelConfig model = complete(find_preset("llama-8b").model, 4096);
  const auto parts = stage_parts(model, describe(model, 4096), false, CutAt::kHalves);
  const Schedule schedule = make_schedule(ScheduleName::kZbV, {4, 8});
  const double spread = head_flops(model);
  CutWork cut(parts, split_evenly(parts, schedule.stages).first, schedule.ranks_of_stages(), spread);
  int64_t moved = 0;
  for (size_t step = 0; step < 2000; ++step) {
    const CutMove one{1 + step % 7, static_cast<int64_t>(step % 5) - 2},
        other{1 + step / 7 % 7, one.cut == 1 + step / 7 % 7 ? 0 : static_cast<int64_t>(step % 3) - 1};
    const std::vector<int64_t> before = cut.first();
    if (!cut.move(one, other)) {
      EXPECT_EQ(cut.first(), before);
    } else if (step % 4 == 0) {
      cut.undo(one, other);
      EXPECT_EQ(cut.first(), before);
    } else {
      ++moved;
    }
    const StageSplit made = cut_at(cut.first(), parts, spread);
    for (size_t stage = 0; stage < 8; ++stage) ASSERT_EQ(cut.of_stages()[stage], made.all_work(stage));
    ASSERT_EQ(std::ranges::max(cut.of_ranks()), most_work(made, schedule));
  }
  EXPECT_GT(moved, 200);
}

/// Blocks are shared out alone, and 1f1b waits for no rank that has the head.
TEST(PipelinePlan, ASpreadHeadKeepsRanksBusy) {
  const auto busy = [](const char* spread) {
    const PipelinePlan plan =
        plan_of(config_with({"parallel.pp=4", "model.preset=mini-gpt-153m", "model.tie_embeddings=false",
                             "pipeline.micro_batches=16", "train.global_batch=16",
                             fmt::format("pipeline.spread_head={}", spread)}),
                4);
    return simulate(plan.schedule, work_of_passes(plan)).efficiency();
  };
  EXPECT_GT(busy("true"), 0.9);
  EXPECT_LT(busy("false"), 0.7);
}

TEST(PipelinePlan, RefusesMoreStagesThanBlocksAndMoreRanksThanRows) {
  const std::vector<std::string> spread = {"model.tie_embeddings=false", "pipeline.spread_head=true",
                                           "train.global_batch=32"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), spread.begin(), spread.end());
    return more;
  };
  test::expect_mentions(refusal(with({"parallel.pp=5"}), 5), {"5 stages", "4 blocks to distribute"});
  test::expect_refusal([] { share_rows(3, 4); }, {"4 ranks", "3 rows", "spread_head=false"});
  test::expect_mentions(refusal(with({"parallel.pp=2", "pipeline.split=4,0"}), 2),
                        {"stage 1", "nothing to do"});
}

TEST(PipelinePlan, ReadsAScheduleOfTheUsersOwn) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("trireme-plan-{}.csv", ::getpid());
  std::ofstream(path) << to_csv(make_schedule(ScheduleName::kZbV, {2, 4, 1}));
  const std::vector<std::string> mine = {"parallel.pp=2", "pipeline.file=" + path.string(),
                                         "pipeline.placement=v"};
  const PipelinePlan plan = plan_of(config_with(mine), 2);
  EXPECT_EQ(plan.schedule.stages, 4);
  EXPECT_EQ(plan.schedule.micro_batches, 4) << "as many as the schedule has";
  test::expect_mentions(refusal({mine[0], mine[1], mine[2], "pipeline.micro_batches=8"}, 2),
                        {"pipeline.micro_batches=8", "has 4"});
  test::expect_mentions(refusal({"parallel.pp=4", mine[1], mine[2]}, 4), {"for 2 ranks", "parallel.pp=2"});
  test::expect_mentions(refusal({mine[0], mine[1]}, 2), {"stage 3 is on rank 1"});
  std::filesystem::remove(path);
  test::expect_mentions(refusal(mine, 2), {"pipeline.file", "cannot be read"});
}

}  // namespace
}  // namespace trireme::plan
