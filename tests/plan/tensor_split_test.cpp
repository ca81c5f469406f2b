#include "trireme/plan/tensor_split.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/stages.h"

namespace trireme::plan {
namespace {

ModelConfig model_of(ModelFamily family, int64_t kv_heads, bool tied) {
  return complete({.family = family,
                   .n_layers = 3,
                   .d_model = 48,
                   .n_heads = 8,
                   .n_kv_heads = kv_heads,
                   .d_ff = 104,
                   .vocab_size = 259,
                   .tie_embeddings = tied},
                  16);
}

std::vector<ModelConfig> models() {
  std::vector<ModelConfig> all;
  for (const bool tied : {false, true}) {
    all.push_back(model_of(ModelFamily::kGpt2, 8, tied));
    for (const int64_t kv_heads : {1, 2, 8}) all.push_back(model_of(ModelFamily::kLlama, kv_heads, tied));
  }
  return all;
}

/// Whatever the ranks along tp, the stages and the shards, what is saved covers each parameter once.
TEST(TensorSplit, TheSavedPartsCoverTheModel) {
  for (const ModelConfig& model : models()) {
    const ModelFacts whole = describe(model, 16);
    for (const int64_t ranks : {2, 4, 8}) {
      for (const int64_t stages : {1, 2}) {
        std::map<std::string, std::vector<Region>> saved;
        std::map<std::string, int64_t> firsts;
        const StageSplit cut = split_evenly(stage_parts(model, whole), stages);
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const ModelFacts facts = describe(model, 16, {}, {}, {ranks, rank});
          for (int64_t stage = 0; stage < stages; ++stage) {
            for (const UnitSpec& unit : stage_units(model, facts, units_of_stage(cut, stage))) {
              const FlatLayout layout = flat_layout(unit, 3);
              for (const FlatEntry& entry : layout.entries()) {
                if (entry.part.copy > 0) continue;
                firsts[entry.name] += entry.part.first_element() == 0 ? 1 : 0;
                for (int64_t shard = 0; shard < 3; ++shard)
                  saved[entry.name].push_back(
                      entry.region(intersect(layout.shard(shard), {entry.offset, entry.end()})));
              }
            }
          }
        }
        for (const UnitSpec& unit : whole.units) {
          for (const ParamSpec& param : unit.params) {
            std::vector<const Region*> regions;
            for (const Region& region : saved[param.name]) regions.push_back(&region);
            EXPECT_EQ(coverage_error(param.shape, regions), "") << param.name << " on " << ranks;
            EXPECT_EQ(firsts[param.name], 1) << param.name;
          }
        }
      }
    }
  }
}

/// Neighbours have the copies, and everything that is on several ranks says how many hold it.
TEST(TensorSplit, CopiesAreTheSameRegionOnNeighbours) {
  for (const ModelConfig& model : models()) {
    for (const int64_t ranks : {2, 4, 8}) {
      std::vector<ModelFacts> facts;
      for (int64_t rank = 0; rank < ranks; ++rank)
        facts.push_back(describe(model, 16, {}, {}, {ranks, rank}));
      for (size_t unit = 0; unit < facts[0].units.size(); ++unit) {
        for (size_t i = 0; i < facts[0].units[unit].params.size(); ++i) {
          for (int64_t rank = 0; rank < ranks; ++rank) {
            const ParamSpec& param = facts[static_cast<size_t>(rank)].units[unit].params[i];
            const int64_t first = rank / param.part.copies * param.part.copies;
            EXPECT_EQ(param.part.copy, rank - first) << param.name;
            const ParamSpec& other = facts[static_cast<size_t>(first)].units[unit].params[i];
            EXPECT_EQ(param.part.region(param.shape, {0, param.numel()}),
                      other.part.region(other.shape, {0, other.numel()}))
                << param.name;
          }
        }
      }
    }
  }
}

/// Heads of the queries, keys and values lie apart in the packed matrix of GPT-2.
TEST(TensorSplit, PackedMatricesAreCutByHeads) {
  const ModelConfig model = model_of(ModelFamily::kGpt2, 8, true);
  const ModelFacts facts = describe(model, 16, {}, {}, {4, 2});
  const ParamSpec& qkv = facts.units[1].params[2];
  ASSERT_EQ(qkv.name, "transformer.h.0.attn.c_attn.weight");
  EXPECT_EQ(qkv.shape, (Shape{48, 36}));
  std::vector<int64_t> columns;
  const Region region = qkv.part.region(qkv.shape, {0, 36});
  for (RunCursor cursor(qkv.part.whole, region); !cursor.done(); cursor.next()) {
    for (int64_t i = 0; i < cursor.run().length; ++i) columns.push_back(cursor.run().begin + i);
  }
  std::vector<int64_t> wanted;
  for (const int64_t matrix : {0, 48, 96}) {
    for (int64_t column = 24; column < 36; ++column) wanted.push_back(matrix + column);
  }
  EXPECT_EQ(columns, wanted);
}

TEST(TensorSplit, AWholeModelIsItsOwnPart) {
  const ModelConfig model = model_of(ModelFamily::kLlama, 2, false);
  const ModelFacts whole = describe(model, 16), same = describe(model, 16, {}, {}, {1, 0});
  EXPECT_EQ(same.params, whole.params);
  for (size_t unit = 0; unit < whole.units.size(); ++unit) {
    for (const ParamSpec& param : same.units[unit].params) EXPECT_EQ(param.part, Part()) << param.name;
  }
  EXPECT_EQ(split_obstacle(model, 1), "");
}

/// Products for weights that wait take the input of both first layers and the gradient of both last ones, of
/// all rows, and what is between them, of a rank's features.
TEST(TensorSplit, KeepsAllRowsBetweenTheHalvesOfABackwardPass) {
  Config config;
  config.model = model_of(ModelFamily::kLlama, 8, false);
  config.model.n_layers = 4;
  config.data.seq_len = 16;
  config.train.global_batch = 8;
  config.train.micro_batch = 2;
  config.precision.compute = Dtype::kFp32;
  config.parallel.pp = config.parallel.tp = 2;
  config.pipeline.schedule = ScheduleName::kZbH1;
  const auto kept = [](const Config& asked) {
    const MeshShape mesh = MeshShape::fit(asked.parallel, 4);
    const BatchPlan batch = plan_batch(asked, mesh);
    const ModelFacts facts = describe(asked.model, 16, asked.precision, asked.memory, {2, 0});
    const StepProgram program = config_program(
        asked, facts, batch, engine_setting(asked, mesh, batch.accumulation, Device::kCpu), /*pp_rank=*/0);
    return program.units[1];
  };
  constexpr int64_t kTokens = 2 * 16, kWidth = 48, kHeads = 48, kFeatures = 104;
  constexpr int64_t kElements = kTokens * (4 * kWidth + (2 * kHeads + 2 * kHeads + 3 * kFeatures) / 2);
  EXPECT_EQ(kept(config).between_halves_bytes, 4 * kElements);
  // In FP8 all of it takes a byte, but the inputs that the first layers keep for backward stay as they are.
  config.precision.fp8.recipe = Fp8::kTensorwise;
  EXPECT_EQ(kept(config).between_halves_bytes, kElements);
  const int64_t whole =
      block_bytes(config.model, config.data.seq_len, config.precision, config.memory, /*layer=*/0).saved;
  EXPECT_EQ(kept(config).activation_bytes, kTokens / 2 * (whole + 2 * 3 * kWidth));
}

TEST(TensorSplit, SaysWhichNumbersOfRanksShareAModel) {
  const ModelConfig model = model_of(ModelFamily::kLlama, 2, false);
  EXPECT_EQ(split_obstacle(model, 8), "");
  EXPECT_NE(split_obstacle(model, 3).find("can be shared by 1, 2, 4, 8 ranks"), std::string::npos);
  EXPECT_NE(split_obstacle(model, 16).find("8 heads"), std::string::npos);
  ModelConfig grouped = model;
  grouped.n_heads = 12;
  grouped.n_kv_heads = 4;
  grouped.d_ff = 144;
  EXPECT_NE(split_obstacle(grouped, 6).find("can be shared by 1, 2, 4, 12 ranks"), std::string::npos)
      << split_obstacle(grouped, 6);
  ModelConfig mlp = model;
  mlp.family = ModelFamily::kMlp;
  EXPECT_NE(split_obstacle(mlp, 2).find("family mlp"), std::string::npos);
  EXPECT_THROW(split_model(model, {3, 0}), ConfigError);
}

}  // namespace
}  // namespace trireme::plan
