#include "trireme/bench/pipeline_steps.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/comm/mesh.h"
#include "trireme/kernels/allocation_watch.h"
#include "trireme/kernels/device.h"
#include "trireme/nn/init.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/simulate.h"
#include "trireme/plan/spread_head.h"
#include "trireme/plan/stages.h"
#include "trireme/report/step_times.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/model_stage.h"

namespace trireme::bench {

using plan::ScheduleName;
using train::ModelStage;

double PipelineTimes::median_ms() const {
  return report::median(samples_ms).value_or(0.0);
}

double PipelineTimes::recording_share() const {
  return report::median(recorded_ms).value_or(0.0) / median_ms() - 1.0;
}

namespace {

/// Stages that take equally long, and F, I and W of a rank that do, each 1. With a head that is spread they
/// take what the order of passes was made for, on average over the stages.
plan::Simulation simulate_ideal(const plan::PipelinePlan& planned) {
  const auto& [schedule, split] = planned;
  const auto ranks = static_cast<double>(schedule.ranks.size());
  plan::PassCosts costs;
  costs.forward = costs.backward_input =
      costs.backward_weight = {ranks / static_cast<double>(schedule.stages)};
  if (!schedule.spread_head) return plan::simulate(schedule, costs);
  costs = plan::work_of_passes(planned);
  double of_rank = 0.0;
  for (auto* values : {&costs.forward, &costs.backward_input, &costs.backward_weight}) {
    const auto end = values->begin() + schedule.stages;
    const double all = std::accumulate(values->begin(), end, 0.0);
    std::fill(values->begin(), end, all / static_cast<double>(schedule.stages));
    of_rank += all / ranks;
  }
  for (auto* values : {&costs.forward, &costs.backward_input, &costs.backward_weight})
    for (double& value : *values) value *= 3.0 / of_rank;
  return plan::simulate(schedule, costs);
}

class PipelineClock {
 public:
  PipelineClock(const std::shared_ptr<comm::World>& world, const plan::Config& config, const PipelineRun& run)
      : config_(config), run_(run), mesh_(mesh_of(world, config)) {}

  /// Collective.
  PipelineTimes measure(ScheduleName name);
  int64_t tokens_per_step() const {
    return mesh_.dp->size() * run_.micro_batches * run_.micro_batch_size * config_.data.seq_len;
  }

 private:
  struct Batch {
    at::Tensor inputs, targets;
  };
  static comm::Mesh mesh_of(const std::shared_ptr<comm::World>& world, const plan::Config& config);
  bool on_gpu() const { return mesh_.world->device().is_cuda(); }
  parallel::Options engine_options() const;
  std::unique_ptr<parallel::Pipeline> make_pipeline(const plan::Schedule& schedule,
                                                    const plan::StageSplit& split) const;
  plan::PipelinePlan plan_of(ScheduleName name) const;
  std::function<nn::VocabularyPart(const at::Tensor&, const at::Tensor&)> part_of(
      const ModelStage& head) const;
  Batch batch_of(int64_t step) const;
  void settle() const;
  double timed_step(parallel::Pipeline& pipeline, int64_t step, PipelineTimes& into) const;
  double bytes_of_step(parallel::Pipeline& pipeline, int64_t step) const;
  void run(parallel::Pipeline& pipeline, const plan::Schedule& simulated, PipelineTimes& into) const;
  std::vector<double> from_all(double mine) const;

  plan::Config config_;
  PipelineRun run_;
  comm::Mesh mesh_;
};

/// The ranks that data parallelism leaves are those of a pipeline.
comm::Mesh PipelineClock::mesh_of(const std::shared_ptr<comm::World>& world, const plan::Config& config) {
  plan::ParallelConfig axes = config.parallel;
  axes.dp_shard = std::max<int64_t>(1, axes.dp_shard);
  axes.pp = world->size() / (axes.dp_replicate * axes.dp_shard);
  return comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
}

parallel::Options PipelineClock::engine_options() const {
  parallel::Options options = train::engine_options(config_, mesh_);
  options.average = parallel::Average::kMean;
  return options;
}

/// Model and engines are made anew, so that schedules do not see each other's memory.
std::unique_ptr<parallel::Pipeline> PipelineClock::make_pipeline(const plan::Schedule& schedule,
                                                                 const plan::StageSplit& split) const {
  const nn::InitialWeights initial(config_.model, static_cast<uint64_t>(config_.seed));
  const comm::Mesh engine_mesh = parallel::stage_mesh(schedule, mesh_);
  std::vector<parallel::Stage> stages;
  std::shared_ptr<ModelStage> last;
  for (const int64_t index : schedule.stages_of(mesh_.pp_rank)) {
    const auto module = std::make_shared<ModelStage>(config_.model, plan::units_of_stage(split, index));
    if (schedule.is_head_part(index)) {
      stages.push_back({.index = index, .module = module, .forward = {}, .part = part_of(*module)});
    } else {
      stages.push_back(parallel::make_stage(index, module));
    }
    stages.back().engine = module->make_engine(engine_mesh, engine_options(), initial, config_.memory);
    if (module->is_last()) last = module;
  }
  parallel::PipelineOptions options;
  options.data_parallel.average = parallel::Average::kMean;
  options.tied = ModelStage::ties(config_.model, {schedule, split});
  const auto loss = [last, chunk = config_.memory.loss_chunk_mib << 20](const at::Tensor& x,
                                                                        const at::Tensor& targets) {
    return last->loss(x, {.targets = targets, .chunk_bytes = chunk});
  };
  return std::make_unique<parallel::Pipeline>(schedule, std::move(stages), loss, mesh_, options);
}

std::function<nn::VocabularyPart(const at::Tensor&, const at::Tensor&)> PipelineClock::part_of(
    const ModelStage& head) const {
  return [&head, chunk = config_.memory.loss_chunk_mib << 20](const at::Tensor& hidden,
                                                              const at::Tensor& targets) {
    return head.part(hidden, {.targets = targets, .chunk_bytes = chunk});
  };
}

/// A batch that is equal on all ranks of a pipeline and for all schedules.
PipelineClock::Batch PipelineClock::batch_of(int64_t step) const {
  const int64_t number = step * mesh_.dp->size() + mesh_.dp_rank;
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(config_.seed + number));
  const int64_t rows = run_.micro_batches * run_.micro_batch_size, length = config_.data.seq_len;
  const at::Tensor tokens = at::randint(0, config_.model.vocab_size, {rows, length + 1}, generator, at::kLong)
                                .to(mesh_.world->device());
  return {tokens.narrow(1, 0, length).contiguous(), tokens.narrow(1, 1, length).contiguous()};
}

/// All ranks have done what they were given.
void PipelineClock::settle() const {
  if (on_gpu()) kernels::synchronize_gpu();
  mesh_.all->barrier();
}

std::vector<double> PipelineClock::from_all(double mine) const {
  std::vector<double> all;
  for (const auto& row : comm::gather_scalars(*mesh_.all, {mine})) all.push_back(row.front());
  return all;
}

/// ms.
double PipelineClock::timed_step(parallel::Pipeline& pipeline, int64_t step, PipelineTimes& into) const {
  const Batch batch = batch_of(step);
  settle();
  const double begin = monotonic_seconds();
  const at::Tensor loss = pipeline.forward_backward(batch.inputs, batch.targets);
  settle();
  const double seconds = monotonic_seconds() - begin;
  into.loss = loss.item<double>();
  return 1e3 * seconds;
}

double PipelineClock::bytes_of_step(parallel::Pipeline& pipeline, int64_t step) const {
  const Batch batch = batch_of(step);
  settle();
  const kernels::AllocationWatch watch;
  pipeline.forward_backward(batch.inputs, batch.targets);
  settle();
  return static_cast<double>(watch.peak());
}

/// Recorded steps take turns with those that are timed.
void PipelineClock::run(parallel::Pipeline& pipeline, const plan::Schedule& simulated,
                        PipelineTimes& into) const {
  int64_t step = 0;
  for (; step < run_.warmup; ++step) {
    timed_step(pipeline, step, into);
    pipeline.skip_step();
  }
  into.step_bytes = from_all(bytes_of_step(pipeline, step++));
  pipeline.skip_step();
  if (on_gpu()) at::getDeviceAllocator(at::kCUDA)->resetPeakStats(mesh_.world->device().index());
  std::vector<plan::PipelineReport> reports;
  int64_t sent = 0;
  for (int64_t i = 0; i < run_.steps; ++i) {
    pipeline.record(true);
    into.recorded_ms.push_back(std::ranges::max(from_all(timed_step(pipeline, step++, into))));
    reports.push_back(pipeline.report(simulated));
    pipeline.skip_step();
    pipeline.record(false);
    const int64_t sent_before = pipeline.sent_bytes();  // report() has flushed
    const double mine = timed_step(pipeline, step++, into);
    into.samples_ms.push_back(std::ranges::max(from_all(mine)));
    pipeline.flush();
    sent += pipeline.sent_bytes() - sent_before;
    if (i + 1 == run_.steps) into.grad_norm = pipeline.grad_norm();
    pipeline.skip_step();
  }
  const auto middle = reports.begin() + std::ssize(reports) / 2;
  std::ranges::nth_element(reports, middle, {},
                           [](const plan::PipelineReport& one) { return one.measured.seconds; });
  into.report = std::move(*middle);
  into.sent_bytes = from_all(static_cast<double>(sent) / static_cast<double>(run_.steps));
  if (on_gpu()) into.peak_bytes = from_all(static_cast<double>(kernels::gpu_memory_peak().allocated));
}

plan::PipelinePlan PipelineClock::plan_of(ScheduleName name) const {
  const bool spread = config_.pipeline.spread_head;
  if (spread && run_.study > 0) {
    throw ConfigError(
        "[bench.pipeline] pipeline.spread_head=true cannot be combined with --study {}, which runs the "
        "stages "
        "of all ranks on one; remove one of them",
        run_.study);
  }
  const int64_t ranks = run_.study > 0 ? run_.study : mesh_.pp->size();
  plan::PipelinePlan plan{.schedule = plan::make_schedule(name, {ranks, run_.micro_batches, run_.chunks}),
                          .split = {}};
  const plan::ModelFacts facts = plan::describe(config_.model, config_.data.seq_len);
  const auto parts = plan::stage_parts(config_.model, facts, spread, plan::CutAt::kHalves);
  plan.split = plan::split_for(plan.schedule, parts, spread ? plan::head_flops(config_.model) : 0.0);
  if (spread) plan::spread_head(plan, config_.model);
  return plan;
}

PipelineTimes PipelineClock::measure(ScheduleName name) {
  PipelineTimes measured{.schedule = std::string(plan::name(name))};
  plan::PipelinePlan planned;
  try {
    planned = plan_of(name);
  } catch (const ConfigError& error) {
    measured.refused = error.what();
    return measured;
  }
  const auto& [schedule, split] = planned;
  const plan::Simulation simulation = simulate_ideal(planned);
  measured.stages = schedule.stages;
  measured.makespan = simulation.makespan;
  measured.efficiency = simulation.efficiency();
  const plan::Schedule here = run_.study > 0 ? plan::on_one_rank(schedule) : schedule;
  run(*make_pipeline(here, split), schedule, measured);
  if (on_gpu()) at::getDeviceAllocator(at::kCUDA)->emptyCache();
  return measured;
}

}  // namespace

PipelineSteps time_schedules(const std::shared_ptr<comm::World>& world, const plan::Config& config,
                             const PipelineRun& run, const std::vector<ScheduleName>& names) {
  PipelineClock clock(world, config, run);
  PipelineSteps steps{.tokens = clock.tokens_per_step()};
  for (const ScheduleName name : names) steps.schedules.push_back(clock.measure(name));
  return steps;
}

}  // namespace trireme::bench
