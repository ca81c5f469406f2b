#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/bench/toy_pipeline.h"
#include "trireme/cli/words.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/world.h"
#include "trireme/kernels/device.h"
#include "trireme/plan/config.h"
#include "trireme/report/pipeline_view.h"
#include "trireme/report/step_times.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

using Arm = bench::ToyPipelineArm;

constexpr int64_t kWarmUp = 2;

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
  for (const bench::ToyPipelineMode& mode : run.modes)
    arms.push_back(std::make_unique<Arm>(world, run, mode));
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
