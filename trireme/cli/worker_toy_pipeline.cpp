#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/cli/words.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/mesh.h"
#include "trireme/kernels/device.h"
#include "trireme/nn/layers.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/config.h"
#include "trireme/plan/stages.h"
#include "trireme/report/pipeline_view.h"
#include "trireme/report/step_times.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kFeatures = 50;  ///< of a row, in and out
constexpr int64_t kWarmUp = 2;

at::Generator generator(int64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
}

/// Layers [first, last) of `depth` hidden layers with ReLU and one back to the features.
class ToyStage : public torch::nn::Module {
 public:
  ToyStage(const ToyPipelineOptions& run, int64_t first, int64_t last) : depth_(run.depth), first_(first) {
    const at::NoGradGuard no_grad;
    for (int64_t layer = first; layer < last; ++layer) {
      const int64_t in = layer == 0 ? kFeatures : run.width, out = layer == run.depth ? kFeatures : run.width;
      layers_.push_back(std::make_shared<nn::Linear>(in, out, /*with_bias=*/true));
      register_module(fmt::format("layer{:03}", layer), layers_.back());
      // The layer's own numbers: the same whatever the stages.
      at::Generator numbers = generator(run.seed * 1000 + layer);
      const double bound = 1.0 / std::sqrt(static_cast<double>(in));
      layers_.back()->weight.uniform_(-bound, bound, numbers);
      layers_.back()->bias.uniform_(-bound, bound, numbers);
    }
  }
  at::Tensor forward(const at::Tensor& x) const {
    at::Tensor y = x;
    for (size_t i = 0; i < layers_.size(); ++i) {
      y = layers_[i]->forward(y);
      if (first_ + static_cast<int64_t>(i) < depth_) y = y.relu();
    }
    return y;
  }

 private:
  int64_t depth_, first_;
  std::vector<std::shared_ptr<nn::Linear>> layers_;
};

/// Layers of the stages by what they cost.
plan::StageSplit split_of(const ToyPipelineOptions& run, int64_t stages) {
  std::vector<plan::StagePart> parts;
  for (int64_t layer = 0; layer <= run.depth; ++layer) {
    const double in = static_cast<double>(layer == 0 ? kFeatures : run.width),
                 out = static_cast<double>(layer == run.depth ? kFeatures : run.width);
    parts.push_back({.name = fmt::format("layer {}", layer), .flops = 2.0 * in * out});
  }
  return plan::split_by_cost(parts, stages);
}

/// One way to run, and what it took.
class Arm {
 public:
  Arm(const std::shared_ptr<comm::World>& world, const ToyPipelineOptions& run, const ToyPipelineMode& mode);

  /// Collective. Returns the loss.
  double step(const ToyPipelineOptions& run, int64_t number, bool measured);

  ToyPipelineMode mode;
  std::vector<double> losses, samples_ms;  ///< of measured steps; ms of the slowest rank
  const plan::PipelineReport& median_report() const;

 private:
  std::shared_ptr<comm::World> world_;
  comm::Mesh mesh_;
  plan::Schedule simulated_;
  std::unique_ptr<parallel::Pipeline> pipeline_;
  parallel::Pipeline::Optimizers optimizers_;
  std::vector<plan::PipelineReport> reports_;
};

comm::Mesh pipeline_mesh(const std::shared_ptr<comm::World>& world) {
  plan::ParallelConfig axes;
  axes.pp = world->size();
  return comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
}

Arm::Arm(const std::shared_ptr<comm::World>& world, const ToyPipelineOptions& run,
         const ToyPipelineMode& given)
    : mode(given), world_(world), mesh_(pipeline_mesh(world)) {
  const auto name = plan::parse<plan::ScheduleName>(run.schedule);
  TRIREME_CHECK(name, "[cli.lab] the request has no valid schedule: '{}'", run.schedule);
  simulated_ = plan::make_windowed_schedule(*name, {run.ranks, mode.micro_batches, 1}, mode.window);
  const plan::Schedule schedule = run.study ? plan::on_one_rank(simulated_) : simulated_;
  const plan::StageSplit split = split_of(run, schedule.stages);
  std::vector<parallel::Stage> stages;
  for (const int64_t stage : schedule.stages_of(mesh_.pp_rank)) {
    const auto at = static_cast<size_t>(stage);
    const auto module = std::make_shared<ToyStage>(run, split.first[at], split.first[at + 1]);
    module->to(world->device());
    stages.push_back(parallel::make_stage(stage, module));
  }
  parallel::PipelineOptions options;
  options.blocking_sends = mode.blocking;
  options.record = true;
  const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).square().mean();
  };
  pipeline_ = std::make_unique<parallel::Pipeline>(schedule, std::move(stages), loss, mesh_, options);
  optimizers_ = pipeline_->optimizers([&](std::vector<optim::FlatParam> params) {
    return optim::adamw(std::move(params), {.lr = run.lr, .weight_decay = 0.0});
  });
}

double Arm::step(const ToyPipelineOptions& run, int64_t number, bool measured) {
  at::Generator numbers = generator(run.seed + number);
  const auto rows = [&] {
    return at::randn({run.batch_size, kFeatures}, numbers, at::kFloat).to(world_->device());
  };
  const at::Tensor inputs = rows(), targets = rows();
  if (world_->device().is_cuda()) kernels::synchronize_gpu();
  mesh_.all->barrier();
  const double begin = monotonic_seconds();
  const at::Tensor loss = pipeline_->forward_backward(inputs, targets);
  pipeline_->step(optimizers_);
  if (world_->device().is_cuda()) kernels::synchronize_gpu();
  const double seconds = monotonic_seconds() - begin;
  const double value = loss.item<double>();
  if (!measured) return value;
  double slowest = 0.0;
  for (const auto& rank : comm::gather_scalars(*mesh_.all, {1e3 * seconds}))
    slowest = std::max(slowest, rank[0]);
  samples_ms.push_back(slowest);
  losses.push_back(value);
  reports_.push_back(pipeline_->report(simulated_));
  return value;
}

const plan::PipelineReport& Arm::median_report() const {
  std::vector<const plan::PipelineReport*> sorted;
  for (const plan::PipelineReport& report : reports_) sorted.push_back(&report);
  std::ranges::sort(sorted, {}, [](const plan::PipelineReport* report) { return report->measured.seconds; });
  return *sorted[sorted.size() / 2];
}

double median_ms(const Arm& arm) {
  return report::median(arm.samples_ms).value_or(0.0);
}

double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

/// The figures of the modes beside each other.
std::string table_of(const std::vector<std::unique_ptr<Arm>>& arms, const ToyPipelineOptions& run) {
  std::vector<report::Column> columns = {{run.schedule}};
  for (const auto& arm : arms) columns.push_back({arm->mode.name, report::Align::kRight});
  report::Table table(std::move(columns));
  const auto row = [&](const std::string& title, const auto& cell) {
    std::vector<std::string> cells = {title};
    for (const auto& arm : arms) cells.push_back(cell(*arm));
    table.add_row(std::move(cells));
  };
  row("micro-batches", [&](const Arm& arm) {
    return fmt::format("{} of {} rows", arm.mode.micro_batches, run.batch_size / arm.mode.micro_batches);
  });
  row("most in flight", [](const Arm& arm) { return std::to_string(arm.mode.window); });
  row("sends", [](const Arm& arm) { return std::string(arm.mode.blocking ? "block" : "do not block"); });
  row("ms per step", [](const Arm& arm) { return fmt::format("{:.2f}", median_ms(arm)); });
  row("rows/s", [&](const Arm& arm) {
    return format_count(1e3 * static_cast<double>(run.batch_size) / median_ms(arm));
  });
  row("mean loss", [](const Arm& arm) { return fmt::format("{:.6f}", mean(arm.losses)); });
  const auto stages = arms.front()->median_report().measured.stages.size();
  for (size_t stage = 0; stage < stages; ++stage) {
    row(fmt::format("stage {} utilization", stage), [&](const Arm& arm) {
      const plan::StepUse& use = arm.median_report().measured;
      return percent(use.stages[stage].busy / use.seconds);
    });
    row(fmt::format("stage {} max queues, forward / backward", stage), [&](const Arm& arm) {
      const plan::StageUse& use = arm.median_report().measured.stages[stage];
      return fmt::format("{} / {}", use.forward_queue, use.backward_queue);
    });
  }
  row("idle", [](const Arm& arm) { return percent(arm.median_report().measured.idle_share()); });
  row("idle, simulated", [](const Arm& arm) { return percent(arm.median_report().predicted.idle_share()); });
  for (size_t cause = 0; cause < plan::kIdleCauses; ++cause) {
    row(fmt::format("idle for {}", plan::name(static_cast<plan::IdleCause>(cause))), [&](const Arm& arm) {
      const plan::StepUse& use = arm.median_report().measured;
      double seconds = 0.0;
      for (const plan::RankUse& rank : use.ranks) seconds += rank.idle_causes[cause];
      return percent(seconds / (use.seconds * static_cast<double>(use.ranks.size())));
    });
  }
  return table.to_string();
}

Json to_json(const Arm& arm, const ToyPipelineOptions& run) {
  return {{"mode", arm.mode.name},
          {"micro_batches", arm.mode.micro_batches},
          {"micro_batch_size", run.batch_size / arm.mode.micro_batches},
          {"window", arm.mode.window},
          {"blocking_sends", arm.mode.blocking},
          {"step_ms", median_ms(arm)},
          {"samples_ms", arm.samples_ms},
          {"rows_per_s", 1e3 * static_cast<double>(run.batch_size) / median_ms(arm)},
          {"losses", arm.losses},
          {"report", report::to_json(arm.median_report())}};
}

void print(const std::vector<std::unique_ptr<Arm>>& arms, const ToyPipelineOptions& run) {
  if (run.study) {
    fmt::print(
        "for study: the stages of {} ranks run on one device, one after the other; \"idle, simulated\" is "
        "that of {} ranks with the costs measured here\n",
        run.ranks, run.ranks);
  }
  fmt::print("{}", table_of(arms, run));
  if (arms.size() == 2) {
    fmt::print("{} takes {:.2f} of the time of {}\n", arms[1]->mode.name,
               median_ms(*arms[1]) / median_ms(*arms[0]), arms[0]->mode.name);
  }
}

}  // namespace

int worker_toy_pipeline(const Request& request, const Environment& environment) {
  const ToyPipelineOptions& run = request.toy_pipeline;
  const plan::WorldSpec spec = plan::detect_world(environment);
  const auto device = plan::parse<plan::Device>(run.device);
  TRIREME_CHECK(device, "[cli.lab] the request has no valid device: '{}'", run.device);
  const plan::Config config =
      plan::load({.path = {}, .text = request.config, .overrides = {}}, Environment()).config;
  const auto world = comm::World::join(spec, comm::take_device(*device, spec), config.comm.timeout_s,
                                       {.share = config.comm.peer_memory, .gather = config.comm.gather});
  std::vector<std::unique_ptr<Arm>> arms;
  for (const ToyPipelineMode& mode : run.modes) arms.push_back(std::make_unique<Arm>(world, run, mode));
  const bool speaks = world->rank() == 0;
  for (int64_t step = -kWarmUp; step < run.steps; ++step) {
    // Steps of the modes take turns, so that both meet the same machine.
    for (const auto& arm : arms) {
      const double loss = arm->step(run, step + kWarmUp, step >= 0);
      if (!speaks || request.json || step < 0) continue;
      const std::string loss_text = std::isnan(loss) ? "NaN" : fmt::format("{:.6f}", loss);
      fmt::print("[{}] step {}/{} loss={} micro_batch={} window={}\n", arm->mode.name, step + 1, run.steps,
                 loss_text, run.batch_size / arm->mode.micro_batches, arm->mode.window);
    }
  }
  if (!speaks) return 0;
  if (!run.timeline.empty()) {
    for (const auto& arm : arms) report::write_pictures(arm->median_report(), run.timeline, arm->mode.name);
  }
  if (!request.json) {
    print(arms, run);
    return 0;
  }
  Json rows = Json::array();
  for (const auto& arm : arms) rows.push_back(to_json(*arm, run));
  const Json document = {{"schema", "trireme.lab_pipeline/1"},
                         {"command", request.command},
                         {"device", world->device().is_cuda() ? kernels::gpus().front().name : "cpu"},
                         {"schedule", run.schedule},
                         {"ranks", run.ranks},
                         {"study", run.study},
                         {"modes", rows}};
  fmt::print("{}\n", document.dump(2));
  return 0;
}

}  // namespace trireme::cli
