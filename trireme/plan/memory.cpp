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

/// Kept by each unit for backward: blocks share what the model keeps.
std::vector<int64_t> unit_activations(const ModelFacts& facts, int64_t tokens) {
  std::vector<int64_t> bytes(facts.units.size());
  const bool has_head = facts.units.back().name == kHeadUnit;
  const auto blocks = std::ssize(bytes) - 1 - (has_head ? 1 : 0);
  for (int64_t block = 1; block <= blocks; ++block)
    bytes[static_cast<size_t>(block)] = activation_bytes(facts, tokens) / blocks;
  return bytes;
}

/// Sums of gradients are there from step to step, though they may be freed for the passes between.
bool is_state(const Buffer& buffer) {
  return buffer.is_kept() || buffer.role == Role::kReduced;
}

}  // namespace

StepProgram config_program(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                           const EngineSetting& setting) {
  // More micro-batches repeat the second of three.
  EngineSetting shown = setting;
  shown.accumulation = std::min(batch.accumulation, StepProgram::kMicroBatchesShown);
  const std::vector<UnitSpec> specs = engine_units(config, facts);
  const bool buckets = setting.use_from == UseFrom::kBuckets;
  const std::vector<ProgramUnit> units = program_units(
      specs, setting,
      buckets ? std::vector<int64_t>() : unit_activations(facts, batch.micro_batch * config.data.seq_len));
  return step_program(units, shown, declared_order(units, setting.use_from));
}

StateBytes state_bytes(const StepProgram& program) {
  HeldBytes held;
  for (const Buffer& buffer : program.buffers) {
    if (is_state(buffer) && !buffer.part_of) held[buffer.role] += buffer.bytes;
  }
  return {.parameters = held[Role::kParameters] + held[Role::kShard],
          .gradients = held[Role::kGradients] + held[Role::kReduced],
          .optimizer = held[Role::kMaster] + held[Role::kMoments]};
}

int64_t gathered_bytes(const StepProgram& program) {
  constexpr Role kRoles[] = {Role::kParameters, Role::kSlice, Role::kGradients, Role::kSum};
  const HeldBytes kept = kept_bytes(program);
  int64_t most = 0;
  for (const HeldBytes& held : held_bytes(program)) {
    int64_t sum = 0;
    for (const Role role : kRoles) sum += held[role] - kept[role];
    most = std::max(most, sum);
  }
  return most;
}

int64_t activation_bytes(const ModelFacts& facts, int64_t tokens) {
  return at_most_62_bits(facts.saved_bytes_per_token * static_cast<double>(tokens));
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
  const EngineSetting setting = engine_setting(config, mesh, batch.accumulation, device);
  return rank_bytes(config, facts, batch, config_program(config, facts, batch, setting), device);
}

RankBytes rank_bytes(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                     const StepProgram& program, Device device) {
  const int64_t tokens = batch.micro_batch * config.data.seq_len;
  const int64_t logits =
      at_most_62_bits(static_cast<double>(tokens) *
                      static_cast<double>(config.model.vocab_size * bytes_of(config.precision.compute)));
  return {.state = state_bytes(program),
          .gathered = gathered_bytes(program),
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
