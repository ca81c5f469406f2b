// Models whose blocks under adapters are held in NF4: their layout, step programs, memory and the rules for
// configs.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/base/nf4_format.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/held_parameters.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/step_program.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {
namespace {

Config load_nf4(std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(),
                   {"model.preset=llama-1b", "adapter.kind=lora", "adapter.base=nf4",
                    "precision.compute=bf16", "train.global_batch=8", "train.micro_batch=1"});
  return plan::load({.path = "", .text = "", .overrides = std::move(overrides)}, Environment()).config;
}

ModelFacts facts_of_nf4(const Config& config) {
  return describe(config.model, config.data.seq_len, config.precision, config.memory);
}

int64_t nf4_elements(const ModelFacts& facts) {
  int64_t elements = 0;
  for (const UnitSpec& unit : facts.units)
    for (const ParamSpec& param : unit.params) elements += param.nf4 ? param.numel() : 0;
  return elements;
}

TEST(Nf4Base, IsTheMatricesOfBlocks) {
  for (const char* family : {"gpt2", "llama"}) {
    const ModelFacts facts = facts_of_nf4(load_nf4(
        {"model.preset=", "model.family=" + std::string(family), "model.d_model=64", "model.n_layers=2"}));
    for (size_t unit = 0; unit < facts.units.size(); ++unit) {
      const bool block = unit > 0 && facts.units[unit].name != kHeadUnit;
      for (const ParamSpec& param : facts.units[unit].params)
        EXPECT_EQ(param.nf4, block && param.frozen && param.shape.size() == 2) << param.name;
    }
  }
}

TEST(Nf4Base, ParametersAndShardsBeginAtWholeBlocks) {
  const UnitSpec block =
      facts_of_nf4(load_nf4({"model.d_model=72", "model.n_heads=2", "model.preset="})).units[1];
  for (const int64_t shards : {1, 3, 8}) {
    const FlatLayout layout = frozen_layout(block, shards);
    EXPECT_EQ(layout.shard_numel() % kNf4Block, 0);
    for (const FlatEntry& entry : layout.entries()) EXPECT_EQ(entry.offset % kNf4Block, 0) << entry.name;
  }
}

/// The blocks of a rank's parts along tp are blocks of the whole matrices, or the number of ranks is refused.
TEST(Nf4Base, RanksAlongTpHaveWholeBlocks) {
  int64_t allowed = 0, refused = 0;
  for (const char* family : {"gpt2", "llama"}) {
    for (const char* width : {"128", "192", "256"}) {
      for (const int64_t ranks : {2, 4}) {
        const ModelConfig model =
            complete(load_nf4({"model.preset=", "model.family=" + std::string(family), "model.n_layers=1",
                               "model.n_heads=4", "model.d_model=" + std::string(width),
                               "model.d_ff=" + std::string(width)})
                         .model,
                     64);
        if (!split_obstacle(model, ranks).empty()) {
          ++refused;
          continue;
        }
        ++allowed;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const ModelFacts facts = describe(model, 64, {}, {}, {ranks, rank, 1});
          for (const ParamSpec& param : facts.units[1].params) {
            if (!param.nf4) continue;
            const Region held = param.part.region(param.shape, {0, param.numel()});
            for (RunCursor runs(param.part.whole_of(param.shape), held); !runs.done(); runs.next())
              EXPECT_EQ(runs.run().begin % kNf4Block + runs.run().length % kNf4Block, 0)
                  << family << " " << param.name << " of width " << width << " on " << ranks;
          }
        }
      }
    }
  }
  EXPECT_GT(allowed, 2);
  EXPECT_GT(refused, 2);
}

TEST(Nf4Base, IsRefusedWithoutAdaptersWithFp8AndWhereScalesAreCut) {
  test::expect_refusal([] { load_nf4({"adapter.kind=none"}); }, {"adapter.base", "adapter.kind=none"});
  test::expect_refusal([] { load_nf4({"precision.fp8=tensorwise"}); },
                       {"adapter.base=nf4", "precision.fp8=tensorwise", "adapter.base to model"});
  test::expect_refusal(
      [] {
        load_nf4({"parallel.tp=2", "model.d_ff=8256"});
      },
      {"parallel.tp=2", "4128 neighbouring elements of", "down_proj", "adapter.base=model"});
}

class Nf4Programs : public ::testing::TestWithParam<std::string> {};

TEST_P(Nf4Programs, AreCheckedAndReadBackAndHoldNineSixteenthsOfAByteAnElement) {
  const Config config = load_nf4({"parallel.policy=" + GetParam()});
  const MeshShape mesh = MeshShape::fit(config.parallel, 4);
  const BatchPlan batch = plan_batch(config, mesh);
  const ModelFacts facts = facts_of_nf4(config);
  const EngineSetting setting = engine_setting(config, mesh, batch.accumulation, Device::kCuda);
  const StepProgram program = config_program(config, facts, batch, setting);
  EXPECT_NO_THROW(verify(program));
  EXPECT_EQ(step_program_from_text(to_text(program)), program);
  const int64_t trained = trained_params(facts), encoded = nf4_elements(facts);
  const int64_t others = 2 * (facts.params - trained - encoded), share = setting.shards_parameters() ? 4 : 1;
  const HeldBytes kept = kept_bytes(program);
  const int64_t weights = kept[Role::kParameters] + kept[Role::kShard];
  const int64_t base = (encoded / 16 * 9 + others) / share;
  EXPECT_GE(weights, base);
  EXPECT_LE(weights, base + 2 * trained + (1 << 18));
}

/// A rank's parameters one by one are what its program keeps.
TEST_P(Nf4Programs, CountEachParameterOnce) {
  const Config config = load_nf4({"parallel.policy=" + GetParam()});
  const MeshShape mesh = MeshShape::fit(config.parallel, 4);
  const BatchPlan batch = plan_batch(config, mesh);
  const ModelFacts facts = facts_of_nf4(config);
  const EngineSetting setting = engine_setting(config, mesh, batch.accumulation, Device::kCuda);
  const StateBytes state = state_bytes(config_program(config, facts, batch, setting));
  int64_t sum = 0;
  for (const HeldParameter& param : held_parameters(config, mesh, {}, Device::kCuda, 1)) sum += param.bytes;
  EXPECT_NEAR(static_cast<double>(sum), static_cast<double>(state.parameters + state.optimizer), 1 << 20);
}

INSTANTIATE_TEST_SUITE_P(Policies, Nf4Programs, ::testing::Values("ddp", "zero1", "zero2", "zero3", "fsdp"));

TEST(Nf4Base, ProductsDecodeTheLargestLayer) {
  const Config config = load_nf4({});
  const ModelFacts facts = facts_of_nf4(config);
  const int64_t gate_up = 2 * config.model.d_model * config.model.d_ff;
  EXPECT_EQ(decoded_bytes(facts, 2), 2 * gate_up);
  EXPECT_EQ(rank_bytes(config, 1, Device::kCpu).decoded, 2 * gate_up);
  EXPECT_EQ(decoded_bytes(facts_of_nf4(load_nf4({"adapter.base=model"})), 2), 0);
}

}  // namespace
}  // namespace trireme::plan
