// Where parameters are: all elements are somewhere, and bytes are those that memory is planned with.
#include "trireme/plan/held_parameters.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "trireme/plan/memory.h"

namespace trireme::plan {
namespace {

Config model_on(int64_t pp, int64_t cp, int64_t tp) {
  Config config;
  config.model = complete({.family = ModelFamily::kLlama,
                           .n_layers = 4,
                           .d_model = 64,
                           .n_heads = 8,
                           .n_kv_heads = 2,
                           .d_ff = 128,
                           .vocab_size = 256,
                           .tie_embeddings = false},
                          32);
  config.data.seq_len = 32;
  config.train.global_batch = 32;
  config.train.micro_batch = 2;
  config.parallel.pp = pp;
  config.parallel.cp = cp;
  config.parallel.tp = tp;
  return config;
}

PipelinePlan pipeline_of(const Config& config, const MeshShape& mesh) {
  return config.parallel.pp > 1 ? plan_pipeline(config, plan_batch(config, mesh)) : PipelinePlan();
}

/// The elements of each parameter that no two ranks update make up the model, where all state is sharded.
TEST(HeldParameters, EveryElementIsUpdatedOnce) {
  struct Axes {
    int64_t pp, cp, tp;
    ScheduleName schedule = ScheduleName::k1F1B;
  };
  for (const auto& [pp, cp, tp, schedule] :
       {Axes{1, 1, 1}, Axes{2, 1, 2}, Axes{1, 2, 2}, Axes{1, 1, 4}, Axes{4, 1, 2},
        Axes{2, 1, 2, ScheduleName::kZbV}, Axes{4, 1, 1, ScheduleName::kDualPipe}}) {
    Config config = model_on(pp, cp, tp);
    config.pipeline.schedule = schedule;
    const MeshShape mesh = MeshShape::fit(config.parallel, 8);
    const PipelinePlan pipeline = pipeline_of(config, mesh);
    double updated = 0.0;
    std::map<std::string, Shape> wholes;
    for (int64_t rank = 0; rank < 8; ++rank) {
      for (const HeldParameter& param : held_parameters(config, mesh, pipeline, Device::kCpu, rank)) {
        updated += static_cast<double>(param.updated.size()) / static_cast<double>(param.copies);
        wholes[param.name] = param.whole;
      }
    }
    const ModelFacts whole = describe(config.model, config.data.seq_len);
    EXPECT_NEAR(updated, static_cast<double>(whole.params), 1e-3) << pp << cp << tp;
    for (const UnitSpec& unit : whole.units) {
      for (const ParamSpec& param : unit.params) EXPECT_EQ(wholes.at(param.name), param.shape) << param.name;
    }
  }
}

/// But for padding, which these shapes do not need.
TEST(HeldParameters, TakeTheBytesOfModelState) {
  for (const PolicyName policy :
       {PolicyName::kDdp, PolicyName::kZero1, PolicyName::kZero2, PolicyName::kFsdp}) {
    for (const Dtype compute : {Dtype::kFp32, Dtype::kBf16}) {
      for (const int64_t tp : {1, 2}) {
        Config config = model_on(1, 1, tp);
        config.parallel.policy = policy;
        config.precision.compute = compute;
        const MeshShape mesh = MeshShape::fit(config.parallel, 4);
        int64_t bytes = 0;
        for (const HeldParameter& param : held_parameters(config, mesh, {}, Device::kCpu, 3))
          bytes += param.bytes;
        const StateBytes state = rank_bytes(config, 4, Device::kCpu).state;
        EXPECT_EQ(bytes, state.parameters + state.optimizer) << name(policy) << name(compute) << tp;
      }
    }
  }
}

TEST(HeldParameters, SayWhichPartIsHere) {
  const Config config = model_on(1, 1, 4);
  const MeshShape mesh = MeshShape::fit(config.parallel, 4);
  std::map<std::string, HeldParameter> last;
  for (const HeldParameter& param : held_parameters(config, mesh, {}, Device::kCpu, 3))
    last[param.name] = param;
  const HeldParameter& queries = last.at("model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(queries.whole, (Shape{64, 64}));
  EXPECT_EQ(queries.held, (Shape{16, 64}));
  EXPECT_EQ(queries.cut, 0);
  EXPECT_EQ(queries.part, (Range{48, 64}));
  EXPECT_EQ(queries.copies, 1);
  const HeldParameter& keys = last.at("model.layers.0.self_attn.k_proj.weight");
  EXPECT_EQ(keys.part, (Range{8, 16}));  // two heads of 8 on four ranks
  EXPECT_EQ(keys.copies, 2);
  const HeldParameter& down = last.at("model.layers.3.mlp.down_proj.weight");
  EXPECT_EQ(down.cut, 1);
  EXPECT_EQ(down.part, (Range{96, 128}));
  const HeldParameter& norm = last.at("model.norm.weight");
  EXPECT_FALSE(norm.cut);
  EXPECT_EQ(norm.copies, 4);

  Config packed = model_on(1, 1, 2);
  packed.model.family = ModelFamily::kGpt2;
  packed.model.n_kv_heads = 8;
  for (const HeldParameter& param :
       held_parameters(packed, MeshShape::fit(packed.parallel, 2), {}, Device::kCpu, 1)) {
    if (param.name != "transformer.h.0.attn.c_attn.weight") continue;
    EXPECT_EQ(param.packed, 3);
    EXPECT_EQ(param.part, (Range{32, 64}));
    EXPECT_EQ(param.held, (Shape{64, 96}));
  }
}

}  // namespace
}  // namespace trireme::plan
