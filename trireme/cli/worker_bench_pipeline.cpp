#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/bench/pipeline_steps.h"
#include "trireme/cli/words.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/world.h"
#include "trireme/kernels/device.h"
#include "trireme/report/pipeline_view.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kColumns = 120;  ///< of pictures where stdout is no terminal

double tokens_per_s(const bench::PipelineTimes& one, int64_t tokens) {
  return 1e3 * static_cast<double>(tokens) / one.median_ms();
}

Json to_json(const bench::PipelineTimes& one, int64_t tokens) {
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

report::Table step_table(const std::vector<bench::PipelineTimes>& all, int64_t tokens) {
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
  for (const bench::PipelineTimes& one : all) {
    table.add_row({one.schedule, std::to_string(one.stages), fmt::format("{:.1f}", one.median_ms()),
                   format_count(tokens_per_s(one, tokens)), percent(1.0 - one.efficiency),
                   fmt::format("{:.4f}", one.loss), by_rank(one.sent_bytes), by_rank(one.step_bytes),
                   by_rank(one.peak_bytes)});
  }
  return table;
}

report::Table idle_table(const std::vector<bench::PipelineTimes>& all) {
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
  for (const bench::PipelineTimes& one : all) {
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

void print(const std::vector<bench::PipelineTimes>& all, const BenchPipelineOptions& run, int64_t tokens) {
  std::vector<bench::PipelineTimes> measured;
  std::string left_out;
  for (const bench::PipelineTimes& one : all) {
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
  for (const bench::PipelineTimes& one : measured) {
    fmt::print("\n{}\n{}", report::to_text(one.report),
               report::draw_text(report::timeline_of(one.report), columns));
  }
}

void write_pictures(const std::vector<bench::PipelineTimes>& all, const BenchPipelineOptions& run) {
  for (const bench::PipelineTimes& one : all) {
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
  std::vector<plan::ScheduleName> names;
  for (const std::string& word : run.schedules) {
    const auto name = plan::parse<plan::ScheduleName>(word);
    TRIREME_CHECK(name, "[cli.bench] the request has no valid schedule: '{}'", word);
    names.push_back(*name);
  }
  const auto [tokens, all] = bench::time_schedules(world, config, run, names);
  const bool any =
      std::ranges::any_of(all, [](const bench::PipelineTimes& one) { return one.refused.empty(); });
  const int code = static_cast<int>(any ? ExitCode::kOk : ExitCode::kUsage);
  if (world->rank() != 0) return code;
  if (!run.timeline.empty()) write_pictures(all, run);
  if (!request.json) {
    print(all, run, tokens);
    return code;
  }
  Json rows = Json::array();
  for (const bench::PipelineTimes& one : all) rows.push_back(to_json(one, tokens));
  const Json document = {{"schema", "trireme.bench_pipeline/1"},
                         {"command", request.command},
                         {"device", world->device().is_cuda() ? kernels::gpus().front().name : "cpu"},
                         {"ranks", world->size()},
                         {"micro_batches", run.micro_batches},
                         {"micro_batch_size", run.micro_batch_size},
                         {"study", run.study > 0 ? Json(run.study) : Json()},
                         {"tokens_per_step", tokens},
                         {"rows", rows}};
  fmt::print("{}\n", document.dump(2));
  return code;
}

}  // namespace trireme::cli
