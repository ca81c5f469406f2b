#include "trireme/plan/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <limits>
#include <numeric>
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

/// The largest models of a config are beyond 64 bits.
int64_t at_most_62_bits(double bytes) {
  return static_cast<int64_t>(std::min(bytes, 0x1.0p62));
}

/// The largest number where the sum is beyond it.
int64_t sum_of(std::initializer_list<int64_t> terms) {
  int64_t sum = 0;
  for (const int64_t term : terms) {
    if (__builtin_add_overflow(sum, term, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

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
  return at_most_62_bits(facts.saved_bytes_per_token * static_cast<double>(tokens));
}

int64_t gathered_bytes(const std::vector<UnitSpec>& units, const EngineSetting& setting, int64_t prefetch,
                       Device device) {
  std::vector<int64_t> rest;
  for (size_t i = 1; i < units.size(); ++i) rest.push_back(padded(units[i], setting));
  std::ranges::sort(rest, std::greater<>());
  const int64_t root = units.empty() ? 0 : padded(units.front(), setting);
  const auto root_and_largest = [&](int64_t count) {
    const auto end = rest.begin() + std::min<int64_t>(count, std::ssize(rest));
    return std::accumulate(rest.begin(), end, root);
  };
  const int64_t all = root_and_largest(std::ssize(rest));
  const bool kept = setting.policy.reshard_after_forward != Policy::kSameRanks;
  const int64_t parameters =
      !shards_parameters(setting) ? 0 : setting.compute_bytes * (kept ? all : root_and_largest(1 + prefetch));
  const bool adds_up = setting.accumulation > 1 && setting.reduces_once;
  const bool whole_already = !setting.policy.shard_gradients || shard_ranks(setting) == 1;
  const int64_t in_flight = root_and_largest(device == Device::kCuda ? 2 : 1);
  int64_t gradients = whole_already ? 0 : setting.compute_bytes * in_flight;
  if (adds_up && setting.compute_bytes != kFp32) gradients += kFp32 * all;  // sums of earlier micro-batches
  if (adds_up && setting.compute_bytes == kFp32 && !whole_already) gradients = kFp32 * all;
  return parameters + gradients;
}

int64_t process_baseline(Device device) {
  // CPU: the peak of a worker with a model of 35k parameters. CUDA: the least that nvidia-smi saw beyond
  // torch's allocator in bench/results/gpu_one_h200.json.
  return device == Device::kCuda ? int64_t{1} << 30 : int64_t{128} << 20;
}

int64_t RankBytes::least() const {
  const int64_t busy = sum_of({state.parameters, state.optimizer, activations});
  return std::max(state.total(), busy);
}

int64_t RankBytes::peak() const {
  return sum_of({state.total(), gathered, activations, logits, baseline});
}

RankBytes rank_bytes(const Config& config, int64_t ranks, Device device) {
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  const BatchPlan batch = plan_batch(config.train.global_batch, config.train.micro_batch, mesh.dp_size());
  const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory);
  const EngineSetting setting = engine_setting(config, mesh, batch.accumulation);
  return rank_bytes(config, facts, batch, setting, device);
}

RankBytes rank_bytes(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                     const EngineSetting& setting, Device device) {
  const std::vector<UnitSpec> units = engine_units(config, facts);
  const int64_t tokens = batch.micro_batch * config.data.seq_len;
  const int64_t logits = at_most_62_bits(
      static_cast<double>(tokens) * static_cast<double>(config.model.vocab_size * setting.compute_bytes));
  return {.state = engine_state(units, setting),
          .gathered = gathered_bytes(units, setting, config.parallel.prefetch, device),
          .activations = activation_bytes(facts, tokens),
          .logits = device == Device::kCuda ? std::min(logits, config.memory.loss_chunk_mib << 20) : logits,
          .baseline = process_baseline(device)};
}

std::string memory_advice(const Config& config, int64_t ranks) {
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  const BatchPlan batch = plan_batch(config.train.global_batch, config.train.micro_batch, mesh.dp_size());
  const RankBytes needed =
      rank_bytes(config, ranks, Device::kCpu);  // of which no device changes what is said
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
