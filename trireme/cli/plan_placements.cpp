#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "trireme/base/terminal.h"
#include "trireme/cli/front.h"
#include "trireme/cli/placement_view.h"
#include "trireme/cli/train_job.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/held_parameters.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using PlacementJson = nlohmann::ordered_json;
using plan::HeldParameter;

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

std::string placements_text(const PreparedJob& job, const std::vector<RankPlacements>& ranks,
                            int64_t columns) {
  const RunPlan& run = job.plan;
  report::Table heading({{"placements"}, {job.config.config.name}});
  heading.add_row({"ranks", fmt::format("{} on {}, {}", run.ranks, run.device, run.mesh.to_string())});
  heading.add_row({"policy", plan::resolve_policy(job.config.config.parallel, run.mesh).label()});
  heading.add_row(
      {"bytes", "parameters, masters and optimizer state between steps, without padding and gradients"});
  std::string text = heading.to_string(columns);
  for (const RankPlacements& rank : ranks)
    text += "\n" + placement_table(fmt::format("rank {}", rank.rank), rank.params, columns);
  return text;
}

PlacementJson placements_json(const PreparedJob& job, const std::vector<RankPlacements>& ranks) {
  PlacementJson rows = PlacementJson::array();
  for (const RankPlacements& rank : ranks) {
    PlacementJson row = {{"rank", rank.rank}};
    row.update(placement_json(rank.params));
    rows.push_back(row);
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
