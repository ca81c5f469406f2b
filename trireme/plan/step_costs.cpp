// The costs of a config's step programs at the rates of a machine.
#include <algorithm>
#include <iterator>

#include "trireme/base/error.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/cuda_graphs.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/recompute.h"
#include "trireme/plan/stage_program.h"
#include "trireme/plan/step_time.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {
namespace {

/// A run with all that its plan needs.
struct TimedRun {
  Config config;
  MeshShape mesh;
  Device device = Device::kCpu;
  BatchPlan batch = {};
  ModelFacts facts = {};  ///< of what a rank holds
  EngineSetting setting = {};
  PipelinePlan pipeline = {};
};

TimedRun timed_run(const Config& given, int64_t ranks, Device device) {
  TimedRun run{.config = given, .mesh = MeshShape::fit(given.parallel, ranks), .device = device};
  run.batch = plan_batch(given, run.mesh);
  run.config = settle_recompute(with_possible_fp8(given, device, run.batch), device);
  const Config& config = run.config;
  run.facts = describe(config.model, config.data.seq_len, config.precision, config.memory,
                       largest_split(config.parallel));
  run.setting = engine_setting(config, run.mesh, run.batch.accumulation, device);
  if (config.parallel.pp > 1) run.pipeline = plan_pipeline(config, run.batch);
  return run;
}

void append(std::vector<UnitWork>& to, std::vector<UnitWork> some) {
  std::ranges::move(some, std::back_inserter(to));
}

/// All work of units that are used one after the other.
UnitWork sum_of(const std::vector<UnitWork>& units) {
  UnitWork sum;
  for (const UnitWork& unit : units) {
    sum.forward.insert(sum.forward.end(), unit.forward.begin(), unit.forward.end());
    sum.backward_input.insert(sum.backward_input.end(), unit.backward_input.begin(),
                              unit.backward_input.end());
    sum.backward_weight.insert(sum.backward_weight.end(), unit.backward_weight.begin(),
                               unit.backward_weight.end());
  }
  return sum;
}

/// In the order of the units of the rank's program.
std::vector<UnitWork> work_of_rank(const TimedRun& run, const Rates& rates, int64_t pp_rank) {
  const auto work = [&](const std::vector<UnitSpec>& units) {
    return work_of_units(units, run.config, run.facts, run.batch, run.device, rates);
  };
  if (run.config.parallel.pp == 1) return work(run.facts.units);
  std::vector<UnitWork> all;
  for (const int64_t stage : run.pipeline.schedule.stages_of(pp_rank))
    append(all, work(stage_units(run.config.model, run.facts, units_of_stage(run.pipeline.split, stage))));
  return all;
}

/// Bytes of a rank for the update of a unit, and for the norm of its gradient.
struct UpdateBytes {
  double update = 0.0, norm = 0.0;
};

UpdateBytes update_of_unit(const TimedRun& run, const ProgramUnit& unit, const UnitBuffers& buffers,
                           const EngineSetting& setting) {
  const double updated = unit.trainable ? static_cast<double>(buffers.updated) : 0.0;
  return {.update = update_bytes(updated, setting.moments, setting.compute_bytes),
          .norm = run.config.train.grad_clip > 0.0 ? static_cast<double>(kFp32Bytes) * updated : 0.0};
}

ActionCosts costs_of_rank(const TimedRun& run, const StepProgram& program, const Rates& rates,
                          int64_t pp_rank) {
  const EngineSetting setting =
      run.config.parallel.pp > 1 ? setting_in_stages(run.setting, run.pipeline.schedule) : run.setting;
  ActionCosts costs{.work = work_of_rank(run, rates, pp_rank)};
  if (setting.use_from == UseFrom::kBuckets) {
    costs.whole = sum_of(costs.work);
    costs.work.assign(program.units.size(), {});
  }
  TRIREME_CHECK(costs.work.size() == program.units.size(),
                "[plan.step_time] the program has {} units and the plan {}", program.units.size(),
                costs.work.size());
  const MemoryRates& memory = rates.memory_of(rate_dtype(run.config.precision.compute));
  for (const ProgramUnit& unit : program.units) {
    const UnitBuffers buffers(unit.numel, setting, unit.fp8, unit.frozen, unit.nf4);
    const UpdateBytes bytes = update_of_unit(run, unit, buffers, setting);
    costs.update.push_back(bytes.update / memory.update + bytes.norm / memory.add);
    costs.update_bytes += bytes.update + bytes.norm;
    const auto summed = static_cast<double>(buffers.whole * (setting.compute_bytes + 2 * kFp32Bytes));
    costs.sum.push_back(buffers.sums_micro_batches_apart ? summed / memory.add : 0.0);
  }
  return costs;
}

/// Links by the place of ranks: those of one host are neighbours.
class LinkChooser {
 public:
  LinkChooser(const TimedRun& run, const LinkRates& links)
      : links_(links), mesh_(run.mesh), shard_ranks_(run.setting.shard_ranks()) {}

  double seconds_of(const Transfer& transfer) const {
    if (transfer.bytes == 0) return 0.0;
    const auto bytes = static_cast<double>(transfer.bytes);
    const bool message = transfer.collective == Collective::kSend || transfer.collective == Collective::kRecv;
    if (mesh_.world_size() > links_.host_ranks && span(transfer, message) > links_.host_ranks)
      return links_.between.seconds_of(bytes);
    if (message) return links_.send.seconds_of(bytes);
    const bool gathers =
        transfer.collective == Collective::kAllGather || transfer.collective == Collective::kBroadcast;
    return of_ranks(gathers ? links_.gather : links_.reduce, transfer.ranks).seconds_of(bytes);
  }

 private:
  /// Ranks from the first of a group to its last, counted in ranks of the mesh.
  int64_t span(const Transfer& transfer, bool message) const {
    const int64_t tp = mesh_.size(Axis::kTp), cp = mesh_.size(Axis::kCp);
    if (message) return 2 * mesh_.world_size() / mesh_.size(Axis::kPp);
    if (transfer.along == Along::kTp) return tp;
    if (transfer.along == Along::kCp) return cp * tp;
    const bool shards = transfer.ranks == shard_ranks_;
    return shards ? transfer.ranks * tp : mesh_.world_size() / mesh_.size(Axis::kPp);
  }

  const LinkRates& links_;
  const MeshShape& mesh_;
  int64_t shard_ranks_;
};

void count(StepWork& sum, const std::vector<Work>& work, double times) {
  for (const Work& one : work) {
    StepWork::Amount& amount = sum.amounts[static_cast<size_t>(one.kind)];
    amount.flops += times * one.flops;
    amount.bytes += times * one.bytes;
  }
}

/// The work of an action on `unit`, `times` times. What is computed again belongs to its kinds of kernels.
void count(StepWork& sum, const UnitWork& unit, ActionKind kind, double times) {
  if (kind == ActionKind::kForward) count(sum, unit.forward, times);
  if (kind == ActionKind::kBackward || kind == ActionKind::kBackwardInput) {
    count(sum, unit.backward_input, times);
    count(sum, unit.again, times);
  }
  if (kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight)
    count(sum, unit.backward_weight, times);
}

/// Recorded passes are launched at once.
bool is_recorded(const TimedRun& run) {
  return run.config.train.cuda_graphs != CudaGraphs::kOff && run.device == Device::kCuda &&
         cuda_graphs_obstacle(run.config, /*gpu=*/true, run.batch.dp_size).empty();
}

}  // namespace

StepWork step_work(const Config& config, int64_t ranks, Device device) {
  const TimedRun run = timed_run(config, ranks, device);
  const StepProgram program = config_programs(run.config, run.facts, run.batch, run.setting, run.pipeline)[0];
  const ActionCosts costs = costs_of_rank(run, program, usual_rates(device), /*pp_rank=*/0);
  StepWork sum;
  sum.dtype = rate_dtype(run.config.precision.compute);
  sum.fp8 = run.config.precision.fp8.recipe != Fp8::kOff;
  if (run.config.parallel.pp > 1) {
    for (const Action& action : program.actions) {
      const bool whole = action.unit == Action::kWholeModel;
      count(sum, whole ? costs.whole : costs.work[static_cast<size_t>(action.unit)], action.kind, 1.0);
    }
  } else {
    // A program without stages shows fewer micro-batches than there may be, which are all alike.
    std::vector<UnitWork> all = costs.work;
    all.push_back(costs.whole);
    for (const UnitWork& unit : all) {
      for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackward})
        count(sum, unit, kind, static_cast<double>(run.batch.accumulation));
    }
  }
  // A cast to FP8 computes the activation that it reads.
  if (sum.fp8) sum.amounts[static_cast<size_t>(KernelKind::kActivation)] = {};
  sum.amounts[static_cast<size_t>(KernelKind::kOptimizer)].bytes = costs.update_bytes;
  sum.amounts[static_cast<size_t>(KernelKind::kOther)] = {};
  return sum;
}

StepTime step_time(const Config& config, int64_t ranks, Device device, const Rates& rates) {
  const TimedRun run = timed_run(config, ranks, device);
  const std::vector<StepProgram> programs =
      config_programs(run.config, run.facts, run.batch, run.setting, run.pipeline);
  std::vector<ActionCosts> costs;
  for (size_t rank = 0; rank < programs.size(); ++rank)
    costs.push_back(costs_of_rank(run, programs[rank], rates, static_cast<int64_t>(rank)));
  const LinkChooser links(run, rates.links);
  StepTime time = time_of_programs(
      programs, costs,
      {.transfer_s = [&links](const Transfer& transfer) { return links.seconds_of(transfer); },
       .beside = run.setting.beside,
       .runs_ahead = rates.on_gpu,
       .launch_s = is_recorded(run) ? 0.0 : rates.launch_s,
       .needs_norm = run.config.train.grad_clip > 0.0,
       .norm_s = ranks > 1 ? of_ranks(rates.links.gather, ranks).latency_s : 0.0,
       .micro_batches = run.batch.accumulation});
  const ModelFacts whole = describe(run.config.model, config.data.seq_len, run.config.precision);
  time.tokens = run.batch.global_batch * config.data.seq_len;
  time.peak = rates.peak_of(rate_dtype(run.config.precision.compute));
  time.mfu = whole.flops_per_token * time.tokens_per_s() / static_cast<double>(ranks) / time.peak;
  return time;
}

}  // namespace trireme::plan
