#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/cli/front.h"
#include "trireme/cli/train_job.h"
#include "trireme/cli/words.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/held_parameters.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using PlacementJson = nlohmann::ordered_json;
using plan::HeldParameter;
using report::Align;

struct PlacementOptions {
  TrainJob job;
  std::string gpu;
  std::optional<int64_t> rank;
  bool json = false;
};

struct RankPlacements {
  int64_t rank = 0;
  std::vector<HeldParameter> params;
};

/// Sums over the parameters of a rank.
struct HeldTotals {
  int64_t elements = 0, updated = 0, bytes = 0;
};

HeldTotals totals_of(const RankPlacements& rank) {
  HeldTotals totals;
  for (const HeldParameter& param : rank.params) {
    totals.elements += plan::Region::whole(param.held).numel();
    totals.updated += param.updated.size();
    totals.bytes += param.bytes;
  }
  return totals;
}

/// Those of `rank`, or of the first rank of each place in the pipeline, in the precision that the run will
/// have.
std::vector<RankPlacements> placements_of(const PreparedJob& job, std::optional<int64_t> rank) {
  const RunPlan& run = job.plan;
  if (rank && (*rank < 0 || *rank >= run.ranks)) {
    throw ConfigError("[cli.plan] --rank {} is outside {} ranks; use 0 to {}", *rank, run.ranks,
                      run.ranks - 1);
  }
  const int64_t stage_ranks = run.ranks / run.mesh.size(plan::Axis::kPp);
  const plan::Config config = plan::with_possible_fp8(job.config.config, run.device, run.batch);
  std::vector<RankPlacements> all;
  for (int64_t first = rank.value_or(0); first < run.ranks; first += stage_ranks) {
    all.push_back({first, plan::held_parameters(config, run.mesh, run.pipeline.value_or(plan::PipelinePlan()),
                                                run.device, first)});
    if (rank) break;
  }
  return all;
}

std::string shape_text(const plan::Shape& shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, " x "));
}

/// "dim 0: 0 to 511", "dim 1: 0 to 63 of each of 3", "replicated".
std::string part_text(const HeldParameter& param) {
  if (!param.cut) return param.copies > 1 ? "replicated" : "whole";
  std::string text = fmt::format("dim {}: {} to {}", *param.cut, param.part.begin, param.part.end - 1);
  if (param.packed > 1) text += fmt::format(" of each of {}", param.packed);
  if (param.copies > 1) text += fmt::format(", on {} ranks", param.copies);
  return text;
}

std::string updated_text(const HeldParameter& param) {
  if (param.updated.size() == 0) return "-";
  if (param.updated.size() == plan::Region::whole(param.held).numel()) return "all";
  return fmt::format("{} to {}", param.updated.begin, param.updated.end - 1);
}

std::string placements_text(const PreparedJob& job, const std::vector<RankPlacements>& ranks,
                            int64_t columns) {
  const RunPlan& run = job.plan;
  report::Table heading({{"placements"}, {job.config.config.name}});
  heading.add_row({"ranks", fmt::format("{} on {}, {}", run.ranks, run.device, run.mesh.to_string())});
  heading.add_row({"policy", plan::resolve_policy(job.config.config.parallel, run.mesh).label()});
  heading.add_row(
      {"bytes", "parameters, masters and optimizer state between steps, without padding and gradients"});
  std::string text = heading.to_string(columns);
  for (const RankPlacements& rank : ranks) {
    report::Table table({{fmt::format("rank {}", rank.rank)},
                         {"stage", Align::kRight},
                         {"whole", Align::kRight},
                         {"along tp"},
                         {"held", Align::kRight},
                         {"updates", Align::kRight},
                         {"bytes", Align::kRight}});
    for (const HeldParameter& param : rank.params) {
      table.add_row({param.name, std::to_string(param.stage), shape_text(param.whole), part_text(param),
                     shape_text(param.held), updated_text(param), bytes_text(param.bytes)});
    }
    const HeldTotals totals = totals_of(rank);
    table.add_row({"total", "", "", "", with_commas(totals.elements), with_commas(totals.updated),
                   bytes_text(totals.bytes)});
    text += "\n" + table.to_string(columns);
  }
  return text;
}

PlacementJson to_json(const HeldParameter& param) {
  return {{"name", param.name},
          {"unit", param.unit},
          {"stage", param.stage},
          {"whole_shape", param.whole},
          {"held_shape", param.held},
          {"placement", param.cut ? "shard" : "replicate"},
          {"dim", param.cut ? PlacementJson(*param.cut) : PlacementJson()},
          {"range", param.cut ? PlacementJson({param.part.begin, param.part.end}) : PlacementJson()},
          {"packed", param.packed},
          {"copies", param.copies},
          {"updated", {param.updated.begin, param.updated.end}},
          {"bytes", param.bytes}};
}

PlacementJson placements_json(const PreparedJob& job, const std::vector<RankPlacements>& ranks) {
  PlacementJson rows = PlacementJson::array();
  for (const RankPlacements& rank : ranks) {
    PlacementJson params = PlacementJson::array();
    for (const HeldParameter& param : rank.params) params.push_back(to_json(param));
    const HeldTotals totals = totals_of(rank);
    rows.push_back(
        {{"rank", rank.rank},
         {"parameters", params},
         {"totals", {{"held", totals.elements}, {"updated", totals.updated}, {"bytes", totals.bytes}}}});
  }
  return {{"schema", "trireme.placements/1"},
          {"name", job.config.config.name},
          {"mesh", job.plan.mesh.to_string()},
          {"ranks", rows}};
}

int placements(const PlacementOptions& options, const Front& front) {
  TrainJob job = options.job;
  job.overrides = front.overrides;
  const PreparedJob prepared = plan_train_job(job, front, options.gpu);
  say_notes(prepared.config);
  const std::vector<RankPlacements> ranks = placements_of(prepared, options.rank);
  if (options.json) {
    fmt::print("{}\n", placements_json(prepared, ranks).dump(2));
  } else {
    fmt::print("{}", placements_text(prepared, ranks, terminal_columns(STDOUT_FILENO)));
  }
  return 0;
}

}  // namespace

void add_plan_placements(CLI::App& plan, Front& front) {
  auto options = std::make_shared<PlacementOptions>();
  CLI::App* verb = plan.add_subcommand(
      "placements", "Show where every parameter is: its stage, its part along tp, what a rank updates");
  add_config_file(*verb, options->job.config);
  verb->add_option("-n,--ranks", options->job.ranks, "Ranks of the run (default: all GPUs, else 2)")
      ->option_text("RANKS");
  add_planned_gpu(*verb, options->gpu);
  verb->add_option("--rank", options->rank, "Show this rank (default: the first of each place along pp)")
      ->option_text("R");
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Any config key can be given as --section.key=value.\n"
      "Examples:\n"
      "  trireme plan placements configs/mini-gpt-tp2-pp4.yaml -n 8 --rank 3\n"
      "  trireme plan placements -n 4 --model.preset=llama-tiny --parallel.tp=4 --device=cpu");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return placements(*options, front); }; });
}

}  // namespace trireme::cli
