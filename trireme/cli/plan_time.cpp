#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/base/terminal.h"
#include "trireme/cli/front.h"
#include "trireme/cli/rates_file.h"
#include "trireme/cli/train_job.h"
#include "trireme/cli/words.h"
#include "trireme/plan/step_time.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using TimeJson = nlohmann::ordered_json;
using plan::TimeCause;
using report::Align;

struct TimeOptions {
  TrainJob job;
  std::string gpu, probe;
  bool by_unit = false, json = false;
};

std::string_view words_for(TimeCause cause) {
  switch (cause) {
    case TimeCause::kProducts:
      return "products of matrices";
    case TimeCause::kAttention:
      return "attention";
    case TimeCause::kMemory:
      return "norms, activations, sums, lookups";
    case TimeCause::kLoss:
      return "loss over logits";
    case TimeCause::kAgain:
      return "computed again in backward";
    case TimeCause::kSums:
      return "gradients of micro-batches added up";
    case TimeCause::kUpdate:
      return "update of parameters";
    case TimeCause::kHost:
      return "launches by the host";
    case TimeCause::kParts:
      return "transfers along tp and cp";
    case TimeCause::kGather:
      return "waits for parameters";
    case TimeCause::kReduce:
      return "waits for sums of gradients";
    case TimeCause::kStages:
      return "waits for other stages";
  }
  throw LogicError("[cli.plan] cause {} of time has no words", static_cast<int>(cause));
}

std::string ms(double seconds) {
  return fmt::format("{:.3f}", 1e3 * seconds);
}

std::string time_share(double seconds, double of) {
  return fmt::format("{:.1f}%", 100.0 * seconds / of);
}

plan::Rates rates_for(const TimeOptions& options, plan::Device device) {
  return options.probe.empty() ? plan::usual_rates(device, options.gpu) : read_rates(options.probe, device);
}

/// CPU ranks share the cores of a host: rates of two are not those of one.
std::string other_ranks_text(const plan::Rates& rates, int64_t ranks) {
  if (rates.on_gpu || rates.ranks == ranks) return "";
  return fmt::format("; these ranks share cores otherwise than {} do: measure with -n {}", ranks, ranks);
}

std::string rates_text(const plan::Rates& rates, int64_t ranks) {
  if (!rates.measured)
    return fmt::format("of {}, from {}: not measured on this machine; 'trireme doctor --probe FILE' measures",
                       rates.device, rates.origin);
  return fmt::format("of {}, {} ranks at once, measured: {}{}{}", rates.device, rates.ranks, rates.origin,
                     rates.links.measured ? "" : "; those of links are not measured",
                     other_ranks_text(rates, ranks));
}

std::string summary_table(const PreparedJob& job, const plan::StepTime& time, const plan::Rates& rates,
                          int64_t columns) {
  const plan::RankSeconds& rank = time.busiest();
  report::Table table({{"step"}, {job.config.config.name}});
  table.add_row(
      {"ranks", fmt::format("{} on {}, {}", job.plan.ranks, job.plan.device, job.plan.mesh.to_string())});
  table.add_row({"time", fmt::format("{} ms", ms(time.seconds))});
  table.add_row({"tokens/s", fmt::format("{:.0f}", time.tokens_per_s())});
  table.add_row({"MFU", fmt::format("{:.1f}% of {:.4g} TFLOP/s a rank", 100.0 * time.mfu, time.peak / 1e12)});
  table.add_row({"communication", fmt::format("{} ms, of which {} ms are exposed", ms(rank.communicating),
                                              ms(rank.exposed()))});
  if (time.ranks.size() > 1)
    table.add_row({"pipeline", fmt::format("idle for {:.1f}% of its ranks' time", 100.0 * time.idle())});
  table.add_row({"rates", rates_text(rates, job.plan.ranks)});
  return table.to_string(columns);
}

std::string cause_table(const plan::StepTime& time, int64_t columns) {
  const plan::RankSeconds& rank = time.busiest();
  report::Table table({{"cause"}, {"ms", Align::kRight}, {"share", Align::kRight}});
  for (size_t cause = 0; cause < plan::kTimeCauses; ++cause) {
    const double seconds = rank.causes[cause];
    if (seconds <= 0.0) continue;
    table.add_row({std::string(words_for(static_cast<TimeCause>(cause))), ms(seconds),
                   time_share(seconds, time.seconds)});
  }
  return "\n" + table.to_string(columns);
}

std::string unit_table(const plan::StepTime& time, int64_t columns) {
  report::Table table({{"unit"},
                       {"computing ms", Align::kRight},
                       {"gathering ms", Align::kRight},
                       {"reducing ms", Align::kRight},
                       {"waiting ms", Align::kRight}});
  for (const plan::UnitSeconds& unit : time.busiest().units)
    table.add_row({unit.name, ms(unit.computing), ms(unit.gathering), ms(unit.reducing), ms(unit.waiting)});
  return "\n" + table.to_string(columns);
}

TimeJson rank_json(const plan::RankSeconds& rank) {
  TimeJson causes, units = TimeJson::array();
  for (size_t cause = 0; cause < plan::kTimeCauses; ++cause)
    causes[std::string(plan::kNames<TimeCause>[cause])] = rank.causes[cause];
  for (const plan::UnitSeconds& unit : rank.units) {
    units.push_back({{"name", unit.name},
                     {"computing_s", unit.computing},
                     {"gathering_s", unit.gathering},
                     {"reducing_s", unit.reducing},
                     {"waiting_s", unit.waiting}});
  }
  return {{"causes_s", causes},
          {"communication_s", rank.communicating},
          {"exposed_s", rank.exposed()},
          {"units", units}};
}

TimeJson time_json(const PreparedJob& job, const plan::StepTime& time, const plan::Rates& rates) {
  TimeJson ranks = TimeJson::array();
  for (const plan::RankSeconds& rank : time.ranks) ranks.push_back(rank_json(rank));
  return {{"schema", "trireme.step_time/1"},
          {"name", job.config.config.name},
          {"device", plan::name(job.plan.device)},
          {"ranks", job.plan.ranks},
          {"mesh", job.plan.mesh.to_string()},
          {"seconds", time.seconds},
          {"tokens", time.tokens},
          {"tokens_per_s", time.tokens_per_s()},
          {"mfu", time.mfu},
          {"peak_flops_per_s", time.peak},
          {"idle", time.idle()},
          {"rates",
           {{"device", rates.device},
            {"measured", rates.measured},
            {"ranks", rates.ranks},
            {"links_measured", rates.links.measured},
            {"origin", rates.origin}}},
          {"by_pp_rank", ranks}};
}

int plan_time(const TimeOptions& options, const Front& front) {
  TrainJob job = options.job;
  job.overrides = front.overrides;
  const PreparedJob prepared = plan_train_job(job, front, options.gpu);
  say_notes(prepared.config);
  const plan::Rates rates = rates_for(options, prepared.plan.device);
  const plan::StepTime time =
      plan::step_time(prepared.config.config, prepared.plan.ranks, prepared.plan.device, rates);
  if (options.json) {
    fmt::print("{}\n", time_json(prepared, time, rates).dump(2));
    return 0;
  }
  const int64_t columns = terminal_columns(STDOUT_FILENO);
  fmt::print("{}{}{}", summary_table(prepared, time, rates, columns), cause_table(time, columns),
             options.by_unit ? unit_table(time, columns) : "");
  return 0;
}

}  // namespace

void add_plan_time(CLI::App& plan, Front& front) {
  auto options = std::make_shared<TimeOptions>();
  CLI::App* verb = plan.add_subcommand(
      "time", "Predict how long a step takes, and why: products, attention, memory, transfers, waits");
  add_config_file(*verb, options->job.config);
  verb->add_option("-n,--ranks", options->job.ranks, "Ranks of the run (default: all GPUs, else 2)")
      ->option_text("RANKS");
  add_planned_gpu(*verb, options->gpu);
  verb->add_option("--probe", options->probe,
                   "Rates of the machine, as 'trireme doctor --probe FILE' measures them (default: those of "
                   "the GPU's data sheet)")
      ->option_text("FILE");
  verb->add_flag("--by-unit", options->by_unit, "Also print a line for each unit of the busiest rank");
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Any config key can be given as --section.key=value.\n"
      "Examples:\n"
      "  trireme doctor --probe rates.json && trireme plan time configs/quickstart.yaml --probe rates.json\n"
      "  trireme plan time configs/llama-1b.yaml -n 4 --gpu h100\n"
      "  trireme plan time configs/llama-8b.yaml -n 4 --gpu h200 --by-unit");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return plan_time(*options, front); }; });
}

}  // namespace trireme::cli
