#include "trireme/plan/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/cost.h"
#include "trireme/plan/family_parts.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/given_program.h"
#include "trireme/plan/large_bytes.h"
#include "trireme/plan/loss_bytes.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/optimizer.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/recompute.h"
#include "trireme/plan/saved_copy.h"
#include "trireme/plan/spread_head.h"
#include "trireme/plan/stage_program.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/plan/tensor_transfers.h"

namespace trireme::plan {
namespace {

/// Kept by each unit for backward: blocks share what the model keeps.
std::vector<int64_t> unit_activations(const ModelFacts& facts, int64_t tokens, Device device) {
  std::vector<int64_t> bytes(facts.units.size());
  const bool has_head = facts.units.back().name == kHeadUnit;
  const auto blocks = std::ssize(bytes) - 1 - (has_head ? 1 : 0);
  for (int64_t block = 1; block <= blocks; ++block)
    bytes[static_cast<size_t>(block)] = activation_bytes(facts, tokens, device) / blocks;
  return bytes;
}

/// Sums of gradients are there from step to step, though they may be freed for the passes between.
bool is_state(const Buffer& buffer) {
  return buffer.is_kept() || buffer.role == Role::kReduced;
}

/// How often ranks along tp gather rows for the cut layers of a unit in its backward pass: the input of those
/// that make features, and the gradient of the output of those that use them up.
int64_t entered_and_left(const UnitSpec& unit) {
  int64_t layers = 0;
  for (const BlockLayer layer : {BlockLayer::kQkv, BlockLayer::kAttentionOutput, BlockLayer::kFeedForwardIn,
                                 BlockLayer::kFeedForwardOut})
    layers +=
        std::ranges::any_of(unit.params, [layer](const ParamSpec& param) { return param.layer == layer; });
  return layers;
}

/// Bytes that a unit of a stage keeps, a block or half of one; the embeddings and the head keep nothing here.
/// Between the halves of a backward pass a rank keeps all rows that it has gathered.
BlockBytes kept_by_unit(const UnitSpec& unit, const Config& config, const ModelFacts& facts) {
  const bool attention = unit.name.ends_with(kAttentionHalf), rest = unit.name.ends_with(kMlpHalf);
  const std::string block = attention || rest ? unit.name.substr(0, unit.name.rfind('.')) : unit.name;
  const auto found = std::ranges::find(facts.units, block, &UnitSpec::name);
  const int64_t layer = found - facts.units.begin() - 1;
  if (layer < 0 || layer >= config.model.n_layers) return {};
  const BlockPart part = attention ? BlockPart::kAttention : rest ? BlockPart::kRest : BlockPart::kWhole;
  BlockBytes bytes =
      block_bytes(config.model, config.data.seq_len, config.precision, config.memory, layer, part);
  bytes.saved += kept_as_rows(config.model, config.precision, config.memory, facts.split, layer, part);
  const bool fp8 = multiplies_in_fp8(config.precision.fp8, layer, config.model.n_layers);
  const int64_t gathered = entered_and_left(unit) * config.model.d_model;
  bytes.between_halves += gathered * (fp8 ? 1 : bytes_of(config.precision.compute)) * (facts.split.ranks - 1);
  return bytes;
}

HeadPartBytes part_bytes(const Config& config, const BatchPlan& batch, int64_t rows) {
  return head_part_bytes(batch.micro_batch * config.data.seq_len, rows, config.model.d_model,
                         bytes_of(config.precision.compute));
}

/// The logits of a part of the head belong to its only unit beside the root.
std::vector<ProgramUnit> units_of_head_part(const std::vector<UnitSpec>& units, const Config& config,
                                            const BatchPlan& batch, const EngineSetting& setting) {
  std::vector<ProgramUnit> result = program_units(units, setting);
  const int64_t rows = units.back().params.front().shape.front();
  result.back().activation_bytes = part_bytes(config, batch, rows).kept;
  return result;
}

std::vector<ProgramUnit> units_of_images(const std::vector<UnitSpec>& units, const BatchPlan& batch,
                                         const EngineSetting& setting) {
  std::vector<ProgramUnit> result = program_units(units, setting);
  const auto images = static_cast<double>(batch.micro_batch);
  for (size_t i = 0; i < result.size(); ++i) {
    const ImageCosts& costs = units[i].image;
    const SavedOnGpu saved =
        setting.device == Device::kCuda ? costs.saved_on_gpu : SavedOnGpu{.of_image = costs.saved_bytes};
    const bool is_first = i == 1 && units.front().params.empty();  // behind a root without the stem
    const double arrived = is_first ? saved.of_first_unit : 0.0;
    result[i].activation_bytes = at_most_62_bits(images * saved.of_image + saved.of_micro_batch + arrived);
  }
  return result;
}

/// Tokens of a micro-batch of which a rank has rows. What it has of all tokens, some features or words, is as
/// much as if it had all of these.
double tokens_of_rank(const Config& config, const ModelFacts& facts, const BatchPlan& batch) {
  return static_cast<double>(batch.micro_batch * config.data.seq_len) /
         static_cast<double>(facts.split.ranks * facts.split.contexts);
}

/// Bytes that each stage sends to the next one.
std::vector<int64_t> boundaries_of(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                                   const PipelinePlan& plan) {
  const double tokens = tokens_of_rank(config, facts, batch);
  const double of_token = static_cast<double>(config.model.d_model * bytes_of(config.precision.compute));
  std::vector<int64_t> bytes;
  for (int64_t stage = 0; stage < plan.schedule.stages; ++stage) {
    const auto last = static_cast<size_t>(units_of_stage(plan.split, stage).end) - 1;
    const bool images = reads_images(config.model.family);
    bytes.push_back(at_most_62_bits(tokens * (images ? facts.units[last].image.output_bytes : of_token)));
  }
  return bytes;
}

/// The units of stage `index`, the root first, with the bytes that each keeps of a micro-batch. A stage's
/// output waits for backward where it is also the input of this rank's next stage; tensors from other ranks
/// are in receive buffers, the gradient of the last block's output included. The final norm keeps its input.
std::vector<ProgramUnit> units_of_program(const std::vector<UnitSpec>& units, const Config& config,
                                          const ModelFacts& facts, const BatchPlan& batch,
                                          const EngineSetting& setting, const Schedule& schedule,
                                          int64_t index) {
  const double tokens = tokens_of_rank(config, facts, batch);
  const int64_t width = config.model.d_model * bytes_of(config.precision.compute);
  if (schedule.is_head_part(index)) return units_of_head_part(units, config, batch, setting);
  if (reads_images(config.model.family)) return units_of_images(units, batch, setting);
  const bool is_last = index + 1 == schedule.stages;
  const auto from_other_rank = [&](int64_t neighbour) {
    return schedule.rank_of(neighbour, 0) != schedule.rank_of(index, 0);
  };
  std::vector<BlockBytes> kept;
  for (const UnitSpec& unit : units) kept.push_back(kept_by_unit(unit, config, facts));
  kept.back().saved += is_last && schedule.spread_head ? 2 * width : width;  // what the final norm makes, too
  if (index > 0) kept[std::min<size_t>(1, kept.size() - 1)].saved -= width;
  if (!is_last && from_other_rank(index + 1)) kept.back().between_halves -= width;
  std::vector<ProgramUnit> result = program_units(units, setting);
  for (size_t i = 0; i < result.size(); ++i) {
    result[i].activation_bytes = at_most_62_bits(tokens * static_cast<double>(kept[i].saved));
    result[i].between_halves_bytes = at_most_62_bits(tokens * static_cast<double>(kept[i].between_halves));
  }
  return result;
}

/// Adds the bytes that norms over all data-parallel ranks send within a pass of a unit, as
/// parallel/sync_batch_norm.cpp does: a mean, a sum of squares and a count in fp64 of every channel forward,
/// two sums in fp32 backward.
void add_norm_transfers(Action& action, const ImageCosts& costs, const Config& config,
                        const EngineSetting& setting) {
  constexpr int64_t kFp64Bytes = 8;
  const int64_t ranks = setting.mesh.dp_size();
  const bool forward = action.kind == ActionKind::kForward;
  // Ranks that share the host's memory read what is as small as this, of all others.
  const bool read = setting.device == Device::kCpu && config.comm.peer_memory;
  Transfer gathered{Collective::kAllGather, ranks, 0}, summed{Collective::kAllReduce, ranks, 0};
  for (const int64_t channels : costs.synced_channels) {
    const int64_t row = kFp64Bytes * (2 * channels + 1), sums = 2 * kFp32Bytes * channels;
    if (forward || costs.computed_again) gathered.bytes += (ranks - 1) * row;
    if (!forward) summed.bytes += read ? (ranks - 1) * sums : wire_bytes(summed.collective, sums, ranks);
  }
  for (const Transfer& transfer : {gathered, summed})
    if (transfer.bytes > 0) action.transfers.push_back(transfer);
}

/// `costs`: of each unit of the program; where its units are buckets, of those that the model has.
void add_norm_transfers(StepProgram& program, const std::vector<ImageCosts>& costs, const Config& config,
                        const EngineSetting& setting) {
  if (setting.mesh.dp_size() == 1) return;
  for (Action& action : program.actions) {
    if (!action.computes() || action.kind == ActionKind::kBackwardWeight) continue;
    if (action.unit != Action::kWholeModel) {
      add_norm_transfers(action, costs[static_cast<size_t>(action.unit)], config, setting);
    } else {
      for (const ImageCosts& unit : costs) add_norm_transfers(action, unit, config, setting);
    }
  }
}

/// Elements of the tied parameter that a unit trains: the embeddings, a copy of them, or rows of one.
int64_t tied_elements(const Config& config, const ModelFacts& facts, const UnitSpec& unit) {
  if (!config.model.tie_embeddings) return 0;
  const std::string& name = facts.units.front().params.front().name;
  const auto tied = std::ranges::find(unit.params, name, &ParamSpec::name);
  return tied == unit.params.end() || tied->frozen ? 0 : tied->numel();
}

/// The first stage has a copy in the last one, or in each part of a head that is spread. Sums travel where a
/// rank has one of two.
TiedElements tied_elements(const Config& config, const ModelFacts& facts, const PipelinePlan& plan,
                           int64_t pp_rank) {
  const Schedule& schedule = plan.schedule;
  const std::vector<int64_t> here = schedule.stages_of(pp_rank);
  const auto is_here = [&](int64_t stage) { return std::ranges::find(here, stage) != here.end(); };
  TiedElements travel;
  const int64_t first = schedule.spread_head ? schedule.stages : schedule.stages - 1;
  for (int64_t stage = first; stage < schedule.all_stages(); ++stage) {
    if (is_here(0) == is_here(stage)) continue;
    for (const UnitSpec& unit : stage_units(config.model, facts, units_of_stage(plan.split, stage)))
      if (const int64_t elements = tied_elements(config, facts, unit); elements > 0)
        travel.push_back(elements);
  }
  return travel;
}

StepProgram pipeline_program(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                             const EngineSetting& given, const PipelinePlan& plan, const StageActions& passes,
                             int64_t pp_rank) {
  const EngineSetting setting = setting_in_stages(given, plan.schedule);
  std::vector<ProgramStage> stages;
  std::vector<ImageCosts> costs;
  std::vector<UnitSpec> all_units;
  for (const int64_t index : plan.schedule.stages_of(pp_rank)) {
    std::vector<UnitSpec> units = stage_units(config.model, facts, units_of_stage(plan.split, index));
    units.front().name = fmt::format("{} of stage {}", kRootUnit, index);
    const bool is_part = plan.schedule.is_head_part(index);
    if (is_part) units.back().name = fmt::format("{} of rank {}", kHeadUnit, pp_rank);
    const bool has_copy =
        index == 0 || (plan.schedule.spread_head ? is_part : index + 1 == plan.schedule.stages);
    for (const UnitSpec& unit : units) costs.push_back(unit.image);
    all_units.insert(all_units.end(), units.begin(), units.end());
    ProgramStage& stage = stages.emplace_back();
    stage.index = index;
    stage.units = units_of_program(units, config, facts, batch, setting, plan.schedule, index);
    for (size_t i = 0; i < units.size(); ++i)
      stage.units[i].tied = tied_elements(config, facts, units[i]) > 0;
    stage.setting = setting;
    stage.order = declared_order(stage.units, UseFrom::kRunUnit);
    stage.tied = config.model.tie_embeddings && has_copy;
  }
  const HeadPartBytes parts = part_bytes(config, batch, 0);
  StepProgram program = stage_program(
      plan.schedule, passes, stages,
      {.boundaries = boundaries_of(config, facts, batch, plan), .part = parts.part, .totals = parts.totals},
      tied_elements(config, facts, plan, pp_rank));
  add_norm_transfers(program, costs, config, setting);
  add_tensor_transfers(program, all_units, config, facts, batch);
  return program;
}

/// Micro-batches at once between their forward and backward pass through a stage of `rank`.
int64_t most_in_flight(const Schedule& schedule, int64_t rank, int64_t stage) {
  int64_t now = 0, most = 0;
  for (const StagePass& pass : schedule.ranks[static_cast<size_t>(rank)]) {
    if (pass.stage != stage || pass.kind == ActionKind::kBackwardWeight) continue;
    now += pass.kind == ActionKind::kForward ? 1 : -1;
    most = std::max(most, now);
  }
  return most;
}

/// The widest output of a block's products, in features that a rank has.
int64_t widest_output(const ModelConfig& held) {
  const ModelFamilyRecord& family = record_of(held.family);
  const int64_t inner = held.d_ff * (family.rotates ? 2 : 1);  // a gate beside what it opens for
  return family.attends ? std::max(inner, query_width(held) + 2 * kv_width(held)) : inner;
}

/// The bytes of a block in its backward pass beyond what is kept anyway: what it computes again with the
/// gradient of its widest output, and gradients of attention's scores. Blocks of models of images are small
/// beside what is kept.
int64_t block_in_backward(const Config& config, const ModelFacts& facts, int64_t sequences, Device device) {
  if (reads_images(config.model.family)) return 0;
  const ModelConfig held = split_model(complete(config.model, config.data.seq_len), facts.split);
  const int64_t tokens = sequences / facts.split.contexts;
  const int64_t scores = tokens * score_gradient_bytes(held, config.data.seq_len);
  if (!computes_blocks_again(config.memory.recompute)) return scores;
  MemoryConfig keeps_all = config.memory;
  keeps_all.recompute = Recompute::kNone;
  const ModelFacts whole =
      describe(config.model, config.data.seq_len, config.precision, keeps_all, facts.split);
  const int64_t more =
      activation_bytes(whole, sequences, device) - activation_bytes(facts, sequences, device);
  const int64_t widest = tokens * widest_output(held) * bytes_of(config.precision.compute);
  return more / std::max<int64_t>(1, config.model.n_layers) + std::max(widest, scores);
}

/// The memory in which GPUs along tp read each other's activations: a micro-batch's rows of all ranks, which
/// are summed, a rank's own rows, which are gathered, and with parallel.async_tp half of the first once more.
/// This memory only grows, to powers of two (parallel/tensor_joint.cpp).
int64_t exchanged_bytes(const Config& config, const ModelFacts& facts, int64_t tokens, Device device) {
  if (device == Device::kCpu || facts.split.ranks == 1 || !config.comm.peer_memory) return 0;
  const auto of_token = static_cast<double>(config.model.d_model * bytes_of(config.precision.compute));
  const int64_t all = at_most_62_bits(static_cast<double>(tokens) * of_token);
  const auto place = [](int64_t bytes) {
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
  };
  return bounded_sum(
      {place(all), place(all / facts.split.ranks), config.parallel.async_tp ? place(all / 2) : 0});
}

int64_t copy_on_device(const RankBytes& bytes) {
  return bytes.pinned_copy > 0 ? 0 : bytes.saved_copy;
}

/// The most of a role that has memory at once.
int64_t most_of(Role role, const StepProgram& program) {
  int64_t most = 0;
  for (const HeldBytes& held : held_bytes(program)) most = std::max(most, held[role]);
  return most;
}

/// The plan of the pipeline; without stages if there is none.
PipelinePlan plan_if_any(const Config& config, const BatchPlan& batch) {
  return config.parallel.pp > 1 ? plan_pipeline(config, batch) : PipelinePlan();
}

StepProgram unchecked_program(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                              const EngineSetting& setting, const PipelinePlan& plan,
                              const StageActions& passes, int64_t pp_rank) {
  if (config.parallel.pp > 1) return pipeline_program(config, facts, batch, setting, plan, passes, pp_rank);
  // More micro-batches repeat the second of three.
  EngineSetting shown = setting;
  shown.accumulation = std::min(batch.accumulation, StepProgram::kMicroBatchesShown);
  const std::vector<UnitSpec> specs = engine_units(config, facts);
  const bool buckets = setting.use_from == UseFrom::kBuckets;
  const std::vector<ProgramUnit> units = program_units(
      specs, setting,
      buckets ? std::vector<int64_t>()
              : unit_activations(facts, batch.micro_batch * config.data.seq_len, setting.device));
  StepProgram program = step_program(units, shown, declared_order(units, setting.use_from));
  std::vector<ImageCosts> costs;
  for (const UnitSpec& unit : facts.units) costs.push_back(unit.image);
  add_norm_transfers(program, costs, config, setting);
  add_tensor_transfers(program, specs, config, facts, batch);
  return program;
}

/// `plan` and `passes`, what a rank of its schedule does, are empty where there is no pipeline.
StepProgram checked_program(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                            const EngineSetting& setting, const PipelinePlan& plan,
                            const StageActions& passes, int64_t pp_rank) {
  StepProgram program = unchecked_program(config, facts, batch, setting, plan, passes, pp_rank);
  if (!has_countable_bytes(program)) {
    throw ConfigError(
        "[plan.memory] a step with micro-batches of {} x data.seq_len={} and {:g} parameters needs more "
        "bytes than 64 bits can count; lower these, model.d_model or model.n_layers",
        batch.micro_batch, config.data.seq_len, static_cast<double>(facts.params));
  }
  return program;
}

/// `ranks`: whose gradients are summed. GPUs of a host read each other's gradients, in memory that is kept
/// for that (DataParallel::symmetric_pool()).
Pooled pooled_by(const Config& config, int64_t ranks, Device device) {
  if (device == Device::kCpu) return Pooled::kGathered;
  const bool as_they_are = wire_dtype(config.precision) == config.precision.compute &&
                           config.parallel.comm_hook == CommHook::kNone &&
                           config.comm.reduction == Reduction::kOrdered;
  const bool shares = ranks > 1 && config.comm.peer_memory && config.parallel.bucket_mib == 0.0;
  return as_they_are && shares ? Pooled::kWholeGradients : Pooled::kNothing;
}

/// The stage of a pipeline rank that makes the loss, or its part of the head; none: it has none.
std::optional<int64_t> loss_stage(const Schedule& schedule, int64_t pp_rank) {
  for (const int64_t stage : schedule.stages_of(pp_rank))
    if (schedule.spread_head ? schedule.is_head_part(stage) : stage + 1 == schedule.stages) return stage;
  return std::nullopt;
}

RankBytes bytes_of_rank(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                        const StepProgram& program, Device device, const PipelinePlan& plan,
                        int64_t pp_rank) {
  const bool staged = config.parallel.pp > 1;
  const int64_t sequences = batch.micro_batch * config.data.seq_len,
                tokens = sequences / facts.split.contexts,
                ranks = batch.dp_size * config.parallel.pp * config.parallel.cp * config.parallel.tp;
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  const auto stage = staged ? loss_stage(plan.schedule, pp_rank) : std::optional<int64_t>(0);
  const LossBytes loss = stage ? loss_of_rank(config, facts, tokens, device, plan, pp_rank) : LossBytes();
  const int64_t in_flight =
      staged && stage && !plan.schedule.spread_head ? most_in_flight(plan.schedule, pp_rank, *stage) : 1;
  RankBytes bytes{.state = state_bytes(program),
                  .gathered = gathered_bytes(program),
                  .activations = staged ? most_of(Role::kActivations, program)
                                        : activation_bytes(facts, sequences, device),
                  .boundaries = kept_bytes(program)[Role::kBoundary],
                  .logits = loss.of(in_flight),
                  .in_backward = block_in_backward(config, facts, sequences, device),
                  .decoded = decoded_bytes(facts, bytes_of(config.precision.compute)),
                  .exchanged = exchanged_bytes(config, facts, tokens, device),
                  .baseline = process_baseline(device, ranks)};
  const EngineSetting setting = engine_setting(config, mesh, batch.accumulation, device);
  const EngineSetting summing = staged ? setting_in_stages(setting, plan.schedule) : setting;
  // Buckets say nothing of activations in their program.
  const int64_t beside_buckets = config.parallel.bucket_mib > 0.0 && !staged ? bytes.activations : 0;
  bytes.step = peak_of_step(program, {.loss_stage = stage.value_or(-1),
                                      .loss_at_work = loss.at_work,
                                      .loss_again = loss.at_work_again,
                                      .loss_kept = loss.kept,
                                      .activations = beside_buckets,
                                      .in_backward = bytes.in_backward,
                                      .decoded = bytes.decoded,
                                      .pooled = pooled_by(config, summing.shard_ranks(), device)});
  if (!saves_in_place(config, device))
    bytes.saved_copy = saved_copy_bytes(config, facts, mesh, plan, pp_rank);
  if (device == Device::kCuda) bytes.pinned_copy = pinned_bytes(bytes.saved_copy);
  return bytes;
}

/// `passes`: of each rank of `plan`, as checked_program() takes them.
std::vector<RankBytes> bytes_of_ranks(const Config& given, int64_t ranks, Device device,
                                      const PipelinePlan& plan, const std::vector<StageActions>& passes) {
  const Config config = settle_recompute(given, device);
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  const BatchPlan batch = plan_batch(config, mesh);
  const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory,
                                    largest_split(config.parallel));
  const EngineSetting setting = engine_setting(config, mesh, batch.accumulation, device);
  std::vector<RankBytes> all;
  for (int64_t pp_rank = 0; pp_rank < config.parallel.pp; ++pp_rank) {
    const StepProgram program =
        checked_program(config, facts, batch, setting, plan, passes[static_cast<size_t>(pp_rank)], pp_rank);
    all.push_back(bytes_of_rank(config, facts, batch, program, device, plan, pp_rank));
  }
  return all;
}

RankBytes largest_of(const std::vector<RankBytes>& ranks) {
  return *std::ranges::max_element(ranks, {}, &RankBytes::peak);
}

/// The largest that a rank's batch divides into of at most half the size.
int64_t smaller_micro_batch(const BatchPlan& batch) {
  int64_t size = batch.micro_batch / 2;
  while (batch.micro_batch * batch.accumulation % size != 0) --size;
  return size;
}

/// A change of the config by which a run needs less memory.
struct Remedy {
  std::function<bool(const Config&)> applies;
  std::string words;  ///< keys and their new values
  std::function<void(Config&)> change;
};

/// A smaller micro-batch, for batches with more than one sequence in each.
Remedy smaller_micro_batches(const Config& config, const BatchPlan& batch) {
  const int64_t size = smaller_micro_batch(batch), count = batch.micro_batch * batch.accumulation / size;
  const bool has_size = config.train.micro_batch > 0;
  const bool by_count = config.parallel.pp > 1 && (config.pipeline.micro_batches > 0 || !has_size);
  const bool by_size = has_size || !by_count;
  std::vector<std::string> keys;
  if (by_count) keys.push_back(fmt::format("pipeline.micro_batches={}", count));
  if (by_size) keys.push_back(fmt::format("train.micro_batch={}", size));
  return {.applies = [](const Config&) { return true; },
          .words = join(keys, " with "),
          .change =
              [=](Config& next) {
                if (by_count) next.pipeline.micro_batches = count;
                if (by_size) next.train.micro_batch = size;
              }};
}

/// In the order in which they are tried, each on top of those that helped before it.
std::vector<Remedy> remedies(const Config& config, const MeshShape& mesh, const BatchPlan& batch) {
  std::vector<Remedy> all = {
      {.applies =
           [](const Config& now) {
             return now.memory.recompute == Recompute::kNone &&
                    record_of(now.model.family).cheap_bytes != nullptr;
           },
       .words = "memory.recompute=cheap",
       .change = [](Config& next) { next.memory.recompute = Recompute::kCheap; }},
      {.applies =
           [accumulates = batch.accumulation > 1](const Config& now) {
             return accumulates && now.parallel.reduce_when == ReduceWhen::kOncePerStep;
           },
       .words = "parallel.reduce_when=every_micro_batch",
       .change = [](Config& next) { next.parallel.reduce_when = ReduceWhen::kEveryMicroBatch; }},
      {.applies = [](const Config& now) { return now.memory.recompute != Recompute::kBlock; },
       .words = "memory.recompute=block",
       .change = [](Config& next) { next.memory.recompute = Recompute::kBlock; }},
      {.applies = [&mesh](const Config& now) { return !resolve_policy(now.parallel, mesh).shard_parameters; },
       .words = "parallel.policy=fsdp",
       .change = [](Config& next) { next.parallel.policy = PolicyName::kFsdp; }}};
  if (batch.micro_batch > 1) all.push_back(smaller_micro_batches(config, batch));
  all.push_back({.applies = [](const Config& now) { return now.optim.state == OptimState::kFp32; },
                 .words = "optim.state=bf16",
                 .change = [](Config& next) { next.optim.state = OptimState::kBf16; }});
  return all;
}

}  // namespace

std::vector<StepProgram> config_programs(const Config& config, const ModelFacts& facts,
                                         const BatchPlan& batch, const EngineSetting& setting) {
  return config_programs(config, facts, batch, setting, plan_if_any(config, batch));
}

std::vector<StepProgram> config_programs(const Config& config, const ModelFacts& facts,
                                         const BatchPlan& batch, const EngineSetting& setting,
                                         const PipelinePlan& plan) {
  std::vector<StepProgram> programs;
  if (config.parallel.pp == 1) {
    programs.push_back(checked_program(config, facts, batch, setting, {}, {}, 0));
  } else {
    const std::vector<StageActions> actions = lower_all(plan.schedule, config.pipeline.ahead);
    for (int64_t rank = 0; rank < config.parallel.pp; ++rank)
      programs.push_back(
          checked_program(config, facts, batch, setting, plan, actions[static_cast<size_t>(rank)], rank));
  }
  if (config.train.step_program.empty()) return programs;
  if (facts.split.rank == 0) return given_programs(config, batch, programs);
  TensorSplit first = facts.split;
  first.rank = 0;
  Config free = config;
  free.train.step_program.clear();
  const ModelFacts of_first =
      describe(config.model, config.data.seq_len, config.precision, config.memory, first);
  return given_programs(config, batch, config_programs(free, of_first, batch, setting, plan), programs);
}

StepProgram config_program(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                           const EngineSetting& setting, int64_t pp_rank) {
  if (config.parallel.pp == 1 || !config.train.step_program.empty())
    return config_programs(config, facts, batch, setting).at(static_cast<size_t>(pp_rank));
  const PipelinePlan plan = plan_pipeline(config, batch);
  return checked_program(config, facts, batch, setting, plan,
                         lower(plan.schedule, pp_rank, config.pipeline.ahead), pp_rank);
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

int64_t activation_bytes(const ModelFacts& facts, int64_t tokens, Device device) {
  SavedOnGpu saved{.of_image = facts.saved_bytes_per_token};
  if (device == Device::kCuda && facts.saved_on_gpu) saved = *facts.saved_on_gpu;
  return at_most_62_bits(saved.of_image * static_cast<double>(tokens) + saved.of_micro_batch);
}

int64_t process_baseline(Device device, int64_t ranks) {
  // CUDA: the least that nvidia-smi saw beyond torch's allocator in bench/results/gpu_one_h200.json.
  if (device == Device::kCuda) return int64_t{1} << 30;
  // The peak of a worker with a model of 30k parameters. Of several ranks each is a copy of a process that
  // has loaded the libraries, and has those of their pages that it touches.
  return int64_t{ranks == 1 ? 143 : 112} << 20;
}

int64_t RankBytes::least() const {
  const int64_t busy = bounded_sum({state.parameters, state.optimizer, activations, boundaries});
  return std::max(bounded_sum({state.total(), copy_on_device(*this)}), busy);
}

int64_t RankBytes::peak() const {
  return bounded_sum({step.total(), exchanged, baseline, copy_on_device(*this)});
}

RankBytes rank_bytes(const Config& config, int64_t ranks, Device device) {
  return largest_of(bytes_by_pp_rank(config, ranks, device));
}

std::vector<RankBytes> bytes_by_pp_rank(const Config& config, int64_t ranks, Device device) {
  const BatchPlan batch = plan_batch(config, MeshShape::fit(config.parallel, ranks));
  return bytes_by_pp_rank(config, ranks, device, plan_if_any(config, batch));
}

std::vector<RankBytes> bytes_by_pp_rank(const Config& config, int64_t ranks, Device device,
                                        const PipelinePlan& pipeline) {
  std::vector<StageActions> passes(1);
  if (config.parallel.pp > 1) passes = lower_all(pipeline.schedule, config.pipeline.ahead);
  return bytes_of_ranks(config, ranks, device, pipeline, passes);
}

RankBytes rank_bytes(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                     const StepProgram& program, Device device, int64_t pp_rank) {
  return rank_bytes(config, facts, batch, program, device, plan_if_any(config, batch), pp_rank);
}

RankBytes rank_bytes(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                     const StepProgram& program, Device device, const PipelinePlan& plan, int64_t pp_rank) {
  return bytes_of_rank(config, facts, batch, program, device, plan, pp_rank);
}

std::string memory_advice(const Config& given, int64_t ranks, Device device) {
  Config config = settle_recompute(given, device);
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  const BatchPlan batch = plan_batch(config, mesh);
  const bool staged = config.parallel.pp > 1;
  // Only another number of micro-batches changes what ranks of a pipeline do.
  PipelinePlan plan = plan_if_any(config, batch);
  std::vector<StageActions> passes(1);
  if (staged) passes = lower_all(plan.schedule, config.pipeline.ahead);
  const auto bytes_with = [&](const Config& changed) {
    const bool same = plan_batch(changed, mesh).accumulation == plan.schedule.micro_batches;
    return staged && !same ? rank_bytes(changed, ranks, device)
                           : largest_of(bytes_of_ranks(changed, ranks, device, plan, passes));
  };
  const RankBytes needed = bytes_with(config);
  const auto bytes = [](int64_t count) { return format_bytes(static_cast<double>(count)); };
  std::string text = fmt::format(
      "Predicted per rank: model state {}, gathered or not yet reduced {}, activations of {} of {} {}{}. ",
      bytes(needed.state.total()), bytes(needed.gathered),
      staged ? "all micro-batches in flight," : "a micro-batch", batch.micro_batch, staged ? "each, " : "",
      bytes(needed.activations));
  std::vector<std::string> fixes;
  int64_t least = needed.peak();
  for (const Remedy& remedy : remedies(config, mesh, batch)) {
    if (!remedy.applies(config)) continue;
    Config changed = config;
    remedy.change(changed);
    try {
      check_config(changed);
      const int64_t peak = bytes_with(changed).peak();
      if (peak >= least) continue;
      config = std::move(changed), least = peak;
      fixes.push_back(fmt::format("{} ({})", remedy.words, bytes(peak)));
    } catch (const ConfigError&) {
      continue;  // something else that the run asks for forbids it
    }
  }
  if (staged) fixes.emplace_back("another pipeline.schedule or pipeline.split");
  fixes.emplace_back(reads_images(config.model.family) ? "more ranks"
                                                       : "a shorter data.seq_len, or more ranks");
  return text + "Try these in order, and combine them if needed: " + join(fixes, "; ");
}

}  // namespace trireme::plan
