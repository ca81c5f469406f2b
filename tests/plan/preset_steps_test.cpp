// The steps of all built-in models under all policies: sound, the same when read back from their text, and
// with bytes that can be counted in another way.
#include <gtest/gtest.h>

#include <functional>

#include "trireme/base/error.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/presets.h"

namespace trireme::plan {
namespace {

struct Step {
  EngineSetting setting;
  StepProgram program;
};

Step step_of(const Preset& preset, const Policy& policy, int64_t accumulation, Dtype compute) {
  constexpr int64_t kRanks = 4;
  Config config;
  config.model = preset.model;
  config.precision.compute = compute;
  config.parallel.dp_replicate = policy.hybrid ? 2 : 1;
  const MeshShape mesh = MeshShape::fit(config.parallel, kRanks);
  EngineSetting setting = engine_setting(config, mesh, accumulation, Device::kCuda);
  setting.policy = policy;
  const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory);
  const BatchPlan batch = plan_batch(kRanks * accumulation, 1, mesh.dp_size());
  return {setting, config_program(config, facts, batch, setting)};
}

void for_all_presets(int64_t accumulation,
                     const std::function<void(const std::string& label, const Step& step)>& body) {
  for (const Preset& preset : presets()) {
    for (const Policy& policy : policies()) {
      for (const Dtype compute : {Dtype::kFp32, Dtype::kBf16}) {
        body(fmt::format("{} {} {}", preset.name, policy.label(), compute),
             step_of(preset, policy, accumulation, compute));
      }
    }
  }
}

TEST(PresetSteps, AreSoundAndComeBackFromTheirText) {
  for (const int64_t accumulation : {1, 3}) {
    for_all_presets(accumulation, [](const std::string& label, const Step& step) {
      SCOPED_TRACE(label);
      ASSERT_NO_THROW(verify(step.program));
      ASSERT_EQ(step_program_from_text(to_text(step.program)), step.program);
    });
  }
}

/// Action by action over all buffers, where held_bytes() sweeps once over changes.
TEST(PresetSteps, HoldWhatTheirBuffersHold) {
  for_all_presets(3, [](const std::string& label, const Step& step) {
    const std::vector<HeldBytes> held = held_bytes(step.program);
    ASSERT_EQ(held.size(), step.program.actions.size());
    for (size_t at = 0; at < held.size(); ++at) {
      HeldBytes sum;
      for (const Buffer& buffer : step.program.buffers) {
        if (!buffer.part_of && buffer.has_memory_at(static_cast<int64_t>(at)))
          sum[buffer.role] += buffer.bytes;
      }
      ASSERT_EQ(held[at].by_role, sum.by_role) << label << " at " << at;
    }
  });
}

/// A rank's sum of gradients is there from where it is first made to where the next step first uses what it
/// updated.
TEST(PresetSteps, SumsThatComeAndGoBeginWithTheirReduction) {
  int64_t seen = 0;
  for_all_presets(3, [&](const std::string& label, const Step& step) {
    const std::vector<Action>& actions = step.program.actions;
    const bool by_buckets = step.setting.use_from == UseFrom::kBuckets;
    for (const Buffer& buffer : step.program.buffers) {
      if (buffer.role != Role::kReduced || buffer.is_kept()) continue;
      ++seen;
      const auto first = [&](ActionKind kind, int64_t unit) {
        int64_t at = 0;
        while (actions[static_cast<size_t>(at)].kind != kind || actions[static_cast<size_t>(at)].unit != unit)
          ++at;
        return at;
      };
      ASSERT_EQ(buffer.from, first(ActionKind::kReduce, buffer.unit)) << label;
      ASSERT_EQ(buffer.to, first(ActionKind::kForward, by_buckets ? Action::kWholeModel : buffer.unit))
          << label;
    }
  });
  EXPECT_GT(seen, 100);
}

/// What rings send for a step of one micro-batch, from the sizes of units alone.
int64_t expected_bytes(const Step& step) {
  const EngineSetting& setting = step.setting;
  const int64_t shards = setting.shard_ranks(), replicas = setting.replicas();
  const auto ring = [](int64_t bytes, int64_t ranks) { return bytes / ranks * (ranks - 1); };
  int64_t all = 0;
  for (const ProgramUnit& unit : step.program.units) all += unit.numel;
  int64_t sum = ring(setting.wire_bytes * all, shards) + 2 * ring(4 * all / shards, replicas);
  const int64_t gathered = ring(setting.compute_bytes * all, shards);
  if (!setting.policy.shard_optimizer) return sum + ring(4 * all, shards);
  if (!setting.policy.shard_parameters) return sum + gathered;
  if (setting.policy.reshard_after_forward != Policy::kSameRanks) return sum + gathered;
  // The first unit and the last stay whole from forward to backward.
  const int64_t once = step.program.units.front().numel + step.program.units.back().numel;
  return sum + 2 * gathered - ring(setting.compute_bytes * once, shards);
}

TEST(PresetSteps, SendWhatRingsSendOfTheirUnits) {
  for_all_presets(1, [](const std::string& label, const Step& step) {
    ASSERT_EQ(step.program.wire_bytes(), expected_bytes(step)) << label;
  });
}

}  // namespace
}  // namespace trireme::plan
