#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/cli/words.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/mesh.h"
#include "trireme/kernels/allocation_watch.h"
#include "trireme/kernels/device.h"
#include "trireme/nn/init.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/schedule.h"
#include "trireme/plan/simulate.h"
#include "trireme/plan/spread_head.h"
#include "trireme/plan/stages.h"
#include "trireme/report/pipeline_view.h"
#include "trireme/report/step_times.h"
#include "trireme/report/table.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/model_stage.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using plan::ScheduleName;
using train::ModelStage;

constexpr int64_t kColumns = 120;  ///< of pictures where stdout is no terminal

/// A schedule, and what a step of it took. Vectors are by rank unless they say otherwise.
struct Measured {
  std::string schedule;
  std::string refused = {};  ///< why it was not run; empty: it was
  int64_t stages = 0;
  std::vector<double> samples_ms = {};      ///< by step, of the slowest rank
  std::vector<double> recorded_ms = {};     ///< of steps that were recorded, in between
  plan::PipelineReport report = {};         ///< of the recorded step of median length
  std::vector<double> step_bytes = {};      ///< the most that a step has beyond what is there before it
  std::vector<double> peak_bytes = {};      ///< of the GPU's allocator; empty on CPUs
  std::vector<double> sent_bytes = {};      ///< of a step, to other stages
  double makespan = 0.0, efficiency = 0.0;  ///< of the simulator
  double loss = 0.0, grad_norm = 0.0;       ///< of the last step

  double median_ms() const { return report::median(samples_ms).value_or(0.0); }
  /// What recording adds to a step.
  double recording_share() const { return report::median(recorded_ms).value_or(0.0) / median_ms() - 1.0; }
};

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

class PipelineBench {
 public:
  PipelineBench(const std::shared_ptr<comm::World>& world, const plan::Config& config,
                const BenchPipelineOptions& run)
      : config_(config), run_(run), mesh_(mesh_of(world, config)) {}

  /// Collective.
  Measured measure(ScheduleName name);
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
  double timed_step(parallel::Pipeline& pipeline, int64_t step, Measured& into) const;
  double bytes_of_step(parallel::Pipeline& pipeline, int64_t step) const;
  void run(parallel::Pipeline& pipeline, const plan::Schedule& simulated, Measured& into) const;
  std::vector<double> from_all(double mine) const;

  plan::Config config_;
  BenchPipelineOptions run_;
  comm::Mesh mesh_;
};

/// The ranks that data parallelism leaves are those of a pipeline.
comm::Mesh PipelineBench::mesh_of(const std::shared_ptr<comm::World>& world, const plan::Config& config) {
  plan::ParallelConfig axes = config.parallel;
  axes.dp_shard = std::max<int64_t>(1, axes.dp_shard);
  axes.pp = world->size() / (axes.dp_replicate * axes.dp_shard);
  return comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
}

parallel::Options PipelineBench::engine_options() const {
  parallel::Options options = train::engine_options(config_, mesh_);
  options.average = parallel::Average::kMean;
  return options;
}

/// Model and engines are made anew, so that schedules do not see each other's memory.
std::unique_ptr<parallel::Pipeline> PipelineBench::make_pipeline(const plan::Schedule& schedule,
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

std::function<nn::VocabularyPart(const at::Tensor&, const at::Tensor&)> PipelineBench::part_of(
    const ModelStage& head) const {
  return [&head, chunk = config_.memory.loss_chunk_mib << 20](const at::Tensor& hidden,
                                                              const at::Tensor& targets) {
    return head.part(hidden, {.targets = targets, .chunk_bytes = chunk});
  };
}

/// The same on all ranks of a pipeline and for all schedules.
PipelineBench::Batch PipelineBench::batch_of(int64_t step) const {
  const int64_t number = step * mesh_.dp->size() + mesh_.dp_rank;
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(config_.seed + number));
  const int64_t rows = run_.micro_batches * run_.micro_batch_size, length = config_.data.seq_len;
  const at::Tensor tokens = at::randint(0, config_.model.vocab_size, {rows, length + 1}, generator, at::kLong)
                                .to(mesh_.world->device());
  return {tokens.narrow(1, 0, length).contiguous(), tokens.narrow(1, 1, length).contiguous()};
}

/// All ranks have done what they were given.
void PipelineBench::settle() const {
  if (on_gpu()) kernels::synchronize_gpu();
  mesh_.all->barrier();
}

std::vector<double> PipelineBench::from_all(double mine) const {
  std::vector<double> all;
  for (const auto& row : comm::gather_scalars(*mesh_.all, {mine})) all.push_back(row.front());
  return all;
}

/// ms.
double PipelineBench::timed_step(parallel::Pipeline& pipeline, int64_t step, Measured& into) const {
  const Batch batch = batch_of(step);
  settle();
  const double begin = monotonic_seconds();
  const at::Tensor loss = pipeline.forward_backward(batch.inputs, batch.targets);
  settle();
  const double seconds = monotonic_seconds() - begin;
  into.loss = loss.item<double>();
  return 1e3 * seconds;
}

double PipelineBench::bytes_of_step(parallel::Pipeline& pipeline, int64_t step) const {
  const Batch batch = batch_of(step);
  settle();
  const kernels::AllocationWatch watch;
  pipeline.forward_backward(batch.inputs, batch.targets);
  settle();
  return static_cast<double>(watch.peak());
}

/// Recorded steps take turns with those that are timed.
void PipelineBench::run(parallel::Pipeline& pipeline, const plan::Schedule& simulated, Measured& into) const {
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

plan::PipelinePlan PipelineBench::plan_of(ScheduleName name) const {
  const bool spread = config_.pipeline.spread_head;
  if (spread && run_.study > 0) {
    throw ConfigError(
        "[cli.bench] pipeline.spread_head=true cannot be combined with --study {}, which runs the stages "
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

Measured PipelineBench::measure(ScheduleName name) {
  Measured measured{.schedule = std::string(plan::name(name))};
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

double tokens_per_s(const Measured& one, int64_t tokens) {
  return 1e3 * static_cast<double>(tokens) / one.median_ms();
}

Json to_json(const Measured& one, int64_t tokens) {
  if (!one.refused.empty()) return {{"schedule", one.schedule}, {"refused", one.refused}};
  return {{"schedule", one.schedule},
          {"stages", one.stages},
          {"step_ms", one.median_ms()},
          {"samples_ms", one.samples_ms},
          {"tokens_per_s", tokens_per_s(one, tokens)},
          {"peak_bytes", one.peak_bytes.empty() ? Json() : Json(one.peak_bytes)},
          {"step_bytes", one.step_bytes},
          {"sent_bytes", one.sent_bytes},
          {"simulated_makespan", one.makespan},
          {"simulated_bubble_share", 1.0 - one.efficiency},
          {"loss", one.loss},
          {"grad_norm", one.grad_norm},
          {"recorded_ms", one.recorded_ms},
          {"report", report::to_json(one.report)}};
}

std::string by_rank(const std::vector<double>& bytes) {
  if (bytes.empty()) return "-";
  std::vector<std::string> words;
  for (const double one : bytes) words.push_back(format_bytes(one));
  return join(words, ", ");
}

/// Of all ranks' time.
double idle_share(const plan::StepUse& use, plan::IdleCause cause) {
  double seconds = 0.0;
  for (const plan::RankUse& rank : use.ranks) seconds += rank.idle_causes[static_cast<size_t>(cause)];
  return seconds / (use.seconds * static_cast<double>(use.ranks.size()));
}

report::Table step_table(const std::vector<Measured>& all, int64_t tokens) {
  using report::Align;
  report::Table table({{"schedule"},
                       {"stages", Align::kRight},
                       {"ms", Align::kRight},
                       {"tokens/s", Align::kRight},
                       {"ideal bubble", Align::kRight},
                       {"loss", Align::kRight},
                       {"sent per step"},
                       {"memory per step"},
                       {"peak"}});
  for (const Measured& one : all) {
    table.add_row({one.schedule, std::to_string(one.stages), fmt::format("{:.1f}", one.median_ms()),
                   format_count(tokens_per_s(one, tokens)), percent(1.0 - one.efficiency),
                   fmt::format("{:.4f}", one.loss), by_rank(one.sent_bytes), by_rank(one.step_bytes),
                   by_rank(one.peak_bytes)});
  }
  return table;
}

report::Table idle_table(const std::vector<Measured>& all) {
  using report::Align;
  std::vector<report::Column> titles = {{"recorded"},
                                        {"ms", Align::kRight},
                                        {"simulated", Align::kRight},
                                        {"idle", Align::kRight},
                                        {"simulated", Align::kRight}};
  for (size_t cause = 0; cause < plan::kIdleCauses; ++cause)
    titles.push_back({std::string(plan::name(static_cast<plan::IdleCause>(cause))), Align::kRight});
  titles.push_back({"recording costs", Align::kRight});
  report::Table table(std::move(titles));
  for (const Measured& one : all) {
    const plan::PipelineReport& report = one.report;
    std::vector<std::string> cells = {one.schedule, fmt::format("{:.1f}", 1e3 * report.measured.seconds),
                                      fmt::format("{:.1f}", 1e3 * report.predicted.seconds),
                                      percent(report.measured.idle_share()),
                                      percent(report.predicted.idle_share())};
    for (size_t cause = 0; cause < plan::kIdleCauses; ++cause)
      cells.push_back(percent(idle_share(report.measured, static_cast<plan::IdleCause>(cause))));
    cells.push_back(percent(one.recording_share()));
    table.add_row(std::move(cells));
  }
  return table;
}

void print(const std::vector<Measured>& all, const BenchPipelineOptions& run, int64_t tokens) {
  std::vector<Measured> measured;
  std::string left_out;
  for (const Measured& one : all) {
    if (one.refused.empty()) {
      measured.push_back(one);
    } else {
      left_out += fmt::format("{} was skipped: {}\n", one.schedule, one.refused);
    }
  }
  if (measured.empty()) {
    fmt::print("{}", left_out);
    return;
  }
  if (run.study > 0) {
    fmt::print(
        "for study: the stages of {} ranks run on one device, one after the other; {} ranks are simulated "
        "with the costs measured here\n",
        run.study, run.study);
  }
  fmt::print("{}{}", step_table(measured, tokens).to_string(), left_out);
  fmt::print(
      "ms: median time of forward and backward per step, slowest rank; bytes: per rank; ideal bubble: "
      "simulated\n"
      "with equal times for all passes and stages, with a head that is spread for all stages\n\n"
      "{}a step of median length, from its first event to the end of its last pass; simulated: with its "
      "measured\n"
      "costs; idle and its causes: shares of the time of all ranks\n",
      idle_table(measured).to_string());
  if (!run.details && measured.size() > 1) return;
  const int64_t terminal = terminal_columns(STDOUT_FILENO), columns = terminal > 0 ? terminal : kColumns;
  for (const Measured& one : measured) {
    fmt::print("\n{}\n{}", report::to_text(one.report),
               report::draw_text(report::timeline_of(one.report), columns));
  }
}

void write_pictures(const std::vector<Measured>& all, const BenchPipelineOptions& run) {
  for (const Measured& one : all) {
    if (one.refused.empty()) report::write_pictures(one.report, run.timeline, one.schedule);
  }
}

}  // namespace

int worker_bench_pipeline(const Request& request, const Environment& environment) {
  const BenchPipelineOptions& run = request.bench_pipeline;
  const plan::WorldSpec spec = plan::detect_world(environment);
  const auto device = plan::parse<plan::Device>(run.device);
  TRIREME_CHECK(device, "[cli.bench] the request has no valid device: '{}'", run.device);
  const plan::Config config =
      plan::load({.path = {}, .text = request.config, .overrides = {}, .tokenizes = false}, Environment())
          .config;
  const auto world = comm::World::join(spec, comm::take_device(*device, spec), config.comm.timeout_s,
                                       {.share = config.comm.peer_memory, .gather = config.comm.gather});
  PipelineBench bench(world, config, run);
  std::vector<Measured> all;
  for (const std::string& name : run.schedules) {
    const auto schedule = plan::parse<ScheduleName>(name);
    TRIREME_CHECK(schedule, "[cli.bench] the request has no valid schedule: '{}'", name);
    all.push_back(bench.measure(*schedule));
  }
  const bool any = std::ranges::any_of(all, [](const Measured& one) { return one.refused.empty(); });
  const int code = static_cast<int>(any ? ExitCode::kOk : ExitCode::kUsage);
  if (world->rank() != 0) return code;
  if (!run.timeline.empty()) write_pictures(all, run);
  if (!request.json) {
    print(all, run, bench.tokens_per_step());
    return code;
  }
  Json rows = Json::array();
  for (const Measured& one : all) rows.push_back(to_json(one, bench.tokens_per_step()));
  const Json document = {{"schema", "trireme.bench_pipeline/1"},
                         {"command", request.command},
                         {"device", world->device().is_cuda() ? kernels::gpus().front().name : "cpu"},
                         {"ranks", world->size()},
                         {"micro_batches", run.micro_batches},
                         {"micro_batch_size", run.micro_batch_size},
                         {"study", run.study > 0 ? Json(run.study) : Json()},
                         {"tokens_per_step", bench.tokens_per_step()},
                         {"rows", rows}};
  fmt::print("{}\n", document.dump(2));
  return code;
}

}  // namespace trireme::cli
