#include "trireme/plan/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "trireme/base/text.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/cost.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/optimizer.h"

namespace trireme::plan {
namespace {

constexpr int64_t kFp32 = 4;

int64_t shard_ranks(const EngineSetting& setting) {
  return setting.policy.shard_ranks(setting.mesh);
}

int64_t replicas(const EngineSetting& setting) {
  return setting.mesh.dp_size() / shard_ranks(setting);
}

bool shards_parameters(const EngineSetting& setting) {
  return setting.policy.shard_parameters && shard_ranks(setting) > 1;
}

/// Elements of a unit with padding.
int64_t padded(const UnitSpec& unit, const EngineSetting& setting) {
  return FlatLayout(unit.params, setting.mesh.dp_size()).numel();
}

StateBytes unit_state(int64_t numel, const EngineSetting& setting) {
  const Policy& policy = setting.policy;
  const int64_t shard = numel / shard_ranks(setting);
  const int64_t range = policy.shard_optimizer ? shard : numel;
  const bool fp32 = setting.compute_bytes == kFp32;
  const bool alone = setting.mesh.dp_size() == 1 && setting.reduces_once && !setting.compresses &&
                     setting.wire_as_computed && setting.wire_bytes == setting.compute_bytes;
  const bool whole = !policy.shard_gradients || alone;
  // fp32 gradients that stay whole are reduced in place, where nothing is added to them afterwards.
  const bool in_place = alone || (fp32 && whole && setting.reduces_once);
  return {.parameters = setting.compute_bytes * (shards_parameters(setting) ? shard : numel),
          .gradients = (whole ? setting.compute_bytes * numel : 0) + (in_place ? 0 : kFp32 * range),
          .optimizer = kFp32 * range * (setting.moments + (fp32 ? 0 : 1))};
}

int64_t reduction_bytes(int64_t numel, const EngineSetting& setting) {
  const int64_t shards = shard_ranks(setting), shard_bytes = kFp32 * numel / shards;
  return wire_bytes(Collective::kAllToAll, setting.wire_bytes * numel, shards) +
         wire_bytes(Collective::kAllToAll, shard_bytes, replicas(setting)) +
         wire_bytes(Collective::kAllGather, shard_bytes, replicas(setting));
}

/// Where a unit is in the forward pass decides how often its parameters are gathered when they are sharded.
enum class Place { kRoot, kBetween, kLast };

int64_t gather_bytes(int64_t numel, Place place, const EngineSetting& setting) {
  const Policy& policy = setting.policy;
  const int64_t shards = shard_ranks(setting), bytes = setting.compute_bytes * numel;
  if (!shards_parameters(setting)) {
    return wire_bytes(Collective::kAllGather, policy.shard_optimizer ? bytes : kFp32 * numel, shards);
  }
  const int64_t whole = wire_bytes(Collective::kAllGather, bytes, shards);
  if (place == Place::kRoot) return whole;
  // Freed after backward, so every micro-batch gathers anew; and once more for backward unless they are kept,
  // as those are with which backward begins.
  const int64_t together = place == Place::kLast ? 1 : policy.reshard_after_forward;
  const int64_t again =
      together == 1 ? 0 : wire_bytes(Collective::kAllGather, bytes, together == 0 ? shards : together);
  return setting.accumulation * (whole + again);
}

}  // namespace

EngineSetting engine_setting(const Config& config, const MeshShape& mesh, int64_t accumulation) {
  return {.policy = resolve_policy(config.parallel, mesh),
          .mesh = mesh,
          .compute_bytes = bytes_of(config.precision.compute),
          .wire_bytes = bytes_of(wire_dtype(config.precision)),
          .wire_as_computed = wire_dtype(config.precision) == config.precision.compute,
          .moments = static_cast<int64_t>(record_of(config.optim.name).state.size()),
          .accumulation = accumulation,
          .reduces_once = config.parallel.reduce_when == ReduceWhen::kOncePerStep,
          .compresses = config.parallel.comm_hook != CommHook::kNone};
}

StateBytes engine_state(const std::vector<UnitSpec>& units, const EngineSetting& setting) {
  StateBytes sum;
  for (const UnitSpec& unit : units) sum += unit_state(padded(unit, setting), setting);
  return sum;
}

int64_t engine_wire_bytes(const std::vector<UnitSpec>& units, const EngineSetting& setting) {
  const int64_t reductions = setting.reduces_once ? 1 : setting.accumulation;
  int64_t sum = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    const int64_t numel = padded(units[i], setting);
    const Place place = i == 0 ? Place::kRoot : i + 1 == units.size() ? Place::kLast : Place::kBetween;
    sum += reductions * reduction_bytes(numel, setting) + gather_bytes(numel, place, setting);
  }
  return sum;
}

int64_t activation_bytes(const ModelFacts& facts, int64_t tokens) {
  constexpr double kMost = 0x1.0p62;  // the largest models of a config are beyond 64 bits
  return static_cast<int64_t>(std::min(facts.saved_bytes_per_token * static_cast<double>(tokens), kMost));
}

int64_t RankBytes::total() const {
  int64_t sum = 0;
  return __builtin_add_overflow(state.total(), activations, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

RankBytes rank_bytes(const Config& config, int64_t ranks) {
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  const BatchPlan batch = plan_batch(config.train.global_batch, config.train.micro_batch, mesh.dp_size());
  const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory);
  return {
      .state = engine_state(engine_units(config, facts), engine_setting(config, mesh, batch.accumulation)),
      .activations = activation_bytes(facts, batch.micro_batch * config.data.seq_len)};
}

std::string memory_advice(const Config& config, int64_t ranks) {
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  const BatchPlan batch = plan_batch(config.train.global_batch, config.train.micro_batch, mesh.dp_size());
  const RankBytes needed = rank_bytes(config, ranks);
  const auto bytes = [](int64_t count) { return format_bytes(static_cast<double>(count)); };
  std::string text = fmt::format("Predicted a rank: model state {}, activations of a micro-batch of {} {}. ",
                                 bytes(needed.state.total()), batch.micro_batch, bytes(needed.activations));
  std::vector<std::string> fixes;
  const bool has_cheap = record_of(config.model.family).cheap_bytes != nullptr;
  if (config.memory.recompute == Recompute::kNone && has_cheap) fixes.emplace_back("memory.recompute=cheap");
  if (config.memory.recompute != Recompute::kBlock) fixes.emplace_back("memory.recompute=block");
  if (batch.micro_batch > 1) fixes.push_back(fmt::format("train.micro_batch={}", batch.micro_batch / 2));
  if (!resolve_policy(config.parallel, mesh).shard_parameters) fixes.emplace_back("parallel.policy=fsdp");
  fixes.emplace_back("a shorter data.seq_len, or more ranks");
  return text + "Try, in this order: " + join(fixes, "; ");
}

}  // namespace trireme::plan
