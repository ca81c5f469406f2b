#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/terminal.h"
#include "trireme/cli/data_path.h"
#include "trireme/cli/front.h"
#include "trireme/cli/train_job.h"
#include "trireme/plan/config.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/schedule.h"
#include "trireme/plan/simulate.h"
#include "trireme/plan/spread_head.h"
#include "trireme/plan/stages.h"
#include "trireme/report/pipeline_view.h"
#include "trireme/report/table.h"
#include "trireme/report/timeline.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using plan::Placement;
using plan::ScheduleName;

constexpr const char* kGreedy = "greedy";
constexpr int64_t kColumnsOfFiles = 200;  ///< where stdout is no terminal

struct PipelineOptions {
  std::string schedule, file, svg, placement = "loop";
  plan::PipelineShape shape{4, 8, 1};
  std::optional<int64_t> chunks = {};  ///< none: as pipeline.chunks, of schedules that interleave stages
  std::vector<double> costs = {1.0, 1.0, 1.0};
  double transfer = 0.0, overlap = 0.0, limit = 0.0, head = 0.0;
  std::optional<int64_t> columns = {};  ///< none: those of the terminal
  bool json = false, csv = false;
};

/// Costs and the limit are of all stages of a rank together, so that schedules with more of them compare.
plan::PassCosts costs_for(const PipelineOptions& options, int64_t stages) {
  const double share = static_cast<double>(options.shape.ranks) / static_cast<double>(stages);
  plan::PassCosts costs;
  costs.forward = {options.costs[0] * share};
  costs.backward_input = {options.costs[1] * share};
  costs.backward_weight = {options.costs[2] * share};
  costs.activation_bytes = {share};
  costs.transfer = options.transfer;
  costs.overlapped_share = options.overlap;
  costs.memory_limit = options.limit;
  return costs;
}

/// A schedule with the head that was asked for, spread over its ranks, and the times of its passes: two of a
/// head's three products are forward passes.
struct Drawn {
  plan::Schedule schedule;
  plan::PassCosts costs;
};

Drawn with_head(plan::Schedule schedule, const PipelineOptions& options) {
  plan::PassCosts costs = costs_for(options, schedule.stages);
  if (options.head == 0.0) return {std::move(schedule), std::move(costs)};
  costs = plan::with_head_parts(schedule, std::move(costs), 2.0 / 3.0 * options.head,
                                1.0 / 3.0 * options.head, 0.0);
  plan::Schedule spread = plan::spread_head(schedule, costs);
  return {std::move(spread), std::move(costs)};
}

/// Names may have hyphens, too.
Placement placement_of(std::string word) {
  std::ranges::replace(word, '-', '_');
  return plan::parse<Placement>(word).value_or(Placement::kLoop);
}

plan::Schedule greedy(const PipelineOptions& options) {
  const Placement placement = placement_of(options.placement);
  plan::PipelineShape shape = options.shape;
  shape.chunks = options.chunks.value_or(1);
  const int64_t stages = placement == Placement::kLoop ? shape.ranks * shape.chunks
                         : placement == Placement::kV  ? 2 * shape.ranks
                                                       : shape.ranks;
  return plan::greedy_schedule(shape, placement, costs_for(options, stages));
}

plan::Schedule chosen(const PipelineOptions& options, const std::string& name) {
  if (name == kGreedy) return greedy(options);
  if (const auto known = plan::parse<ScheduleName>(name)) {
    plan::PipelineShape shape = options.shape;
    if (plan::takes_chunks(*known)) shape.chunks = options.chunks.value_or(plan::PipelineConfig{}.chunks);
    return plan::make_schedule(*known, shape);
  }
  std::string names;
  for (const ScheduleName known : plan::all_values<ScheduleName>()) names += fmt::format("{}, ", known);
  throw ConfigError("[cli.pipeline] there is no schedule '{}'; choose one of {}{}", name, names, kGreedy);
}

std::string numbers(double low, double high) {
  return low == high ? fmt::format("{:g}", low) : fmt::format("{:g} to {:g}", low, high);
}

/// The smallest and the largest peak of the ranks, in micro-batches.
std::string peaks(const plan::Simulation& simulation) {
  const auto [low, high] = std::ranges::minmax(simulation.ranks, {}, &plan::RankTimeline::peak_bytes);
  return numbers(low.peak_bytes, high.peak_bytes);
}

report::Timeline picture(const plan::Schedule& schedule, const plan::Simulation& simulation) {
  report::Timeline timeline;
  timeline.title =
      fmt::format("{}, simulated: {} ranks, {} stages, {} micro-batches; {:g} long, {:.1f}% busy",
                  schedule.name, schedule.ranks.size(), schedule.stages, schedule.micro_batches,
                  simulation.makespan, 100.0 * simulation.efficiency());
  timeline.kinds = report::pass_kinds();
  for (size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const plan::RankTimeline& line = simulation.ranks[rank];
    report::TimelineRow row{.name = fmt::format("rank {}", rank), .bars = {}, .note = {}};
    row.note = fmt::format("idle {:g}, {:g} in flight", simulation.makespan - line.busy, line.peak_bytes);
    for (const plan::TimedPass& timed : line.passes)
      row.bars.push_back(report::bar_of(schedule, timed.pass, timed.begin, timed.end));
    timeline.rows.push_back(std::move(row));
  }
  return timeline;
}

Json to_json(const plan::Schedule& schedule, const plan::Simulation& simulation) {
  Json ranks = Json::array();
  for (const plan::RankTimeline& rank : simulation.ranks) {
    Json passes = Json::array();
    for (const plan::TimedPass& timed : rank.passes)
      passes.push_back({{"pass", plan::to_text(timed.pass)}, {"begin", timed.begin}, {"end", timed.end}});
    ranks.push_back({{"busy", rank.busy},
                     {"idle", simulation.makespan - rank.busy},
                     {"peak_in_flight", rank.peak_bytes},
                     {"passes", passes}});
  }
  return {{"schema", "trireme.pipeline/1"},
          {"schedule", schedule.name},
          {"stages", schedule.stages},
          {"micro_batches", schedule.micro_batches},
          {"makespan", simulation.makespan},
          {"bubble", simulation.bubble()},
          {"efficiency", simulation.efficiency()},
          {"ranks", ranks}};
}

int show(const PipelineOptions& options) {
  plan::Schedule given = options.file.empty()
                             ? chosen(options, options.schedule)
                             : plan::read_schedule(options.file, placement_of(options.placement));
  PipelineOptions read = options;
  read.shape.ranks = static_cast<int64_t>(given.ranks.size());
  const auto [schedule, costs] = with_head(std::move(given), read);
  const plan::Simulation simulation = plan::simulate(schedule, costs);
  const report::Timeline timeline = picture(schedule, simulation);
  if (!options.svg.empty()) write_file_atomic(options.svg, report::draw_svg(timeline));
  if (options.csv) {
    fmt::print("{}", plan::to_csv(schedule));
  } else if (options.json) {
    fmt::print("{}\n", to_json(schedule, simulation).dump(2));
  } else {
    const int64_t terminal = terminal_columns(STDOUT_FILENO);
    fmt::print("{}", report::draw_text(timeline,
                                       options.columns.value_or(terminal > 0 ? terminal : kColumnsOfFiles)));
  }
  return 0;
}

int compare(const PipelineOptions& options) {
  using report::Align;
  report::Table table({{"schedule"},
                       {"long", Align::kRight},
                       {"bubble", Align::kRight},
                       {"busy", Align::kRight},
                       {"in flight per rank", Align::kRight},
                       {"weights per rank", Align::kRight},
                       {"description"}});
  Json rows = Json::array();
  std::string left_out;
  const auto add = [&](plan::Schedule given, std::string_view summary) {
    const auto [schedule, costs] = with_head(std::move(given), options);
    const plan::Simulation simulation = plan::simulate(schedule, costs);
    const int64_t copies = schedule.placement == Placement::kTwoWays ? 2 : 1;
    table.add_row({schedule.name, fmt::format("{:g}", simulation.makespan),
                   fmt::format("{:g}", simulation.bubble()),
                   fmt::format("{:.1f}%", 100.0 * simulation.efficiency()), peaks(simulation),
                   fmt::format("{}x", copies), std::string(summary)});
    Json row = to_json(schedule, simulation);
    row.erase("ranks");
    rows.push_back(std::move(row));
  };
  const auto add_if_possible = [&](std::string_view name, std::string_view summary) {
    try {
      add(chosen(options, std::string(name)), summary);
    } catch (const ConfigError& error) {
      left_out += fmt::format("{}: {}\n", name, error.what());
    }
  };
  for (const ScheduleName name : plan::all_values<ScheduleName>())
    add_if_possible(plan::name(name), plan::summary(name));
  add_if_possible(kGreedy, "built for these costs");
  if (options.json) {
    fmt::print("{}\n", Json{{"schema", "trireme.pipelines/1"}, {"schedules", rows}}.dump(2));
    return 0;
  }
  const std::string overlap = options.overlap > 0.0 ? fmt::format(", overlap {:g}", options.overlap) : "";
  fmt::print("{} ranks, {} micro-batches, per rank: forward {:g}, backward {:g} + {:g}, transfer {:g}{}\n{}",
             options.shape.ranks, options.shape.micro_batches, options.costs[0], options.costs[1],
             options.costs[2], options.transfer, overlap, table.to_string(terminal_columns(STDOUT_FILENO)));
  if (!left_out.empty()) fmt::print("not possible\n{}", left_out);
  return 0;
}

struct StageOptions {
  std::string config;
  int64_t stages = 4, micro_batches = 8;
  bool spread_head = false, json = false;
};

/// 1F1B over stages of these costs.
double efficiency_of(const plan::StageSplit& split, int64_t micro_batches) {
  const auto stages = static_cast<int64_t>(split.flops.size());
  const plan::PipelinePlan cut{plan::make_schedule(ScheduleName::k1F1B, {stages, micro_batches, 1}), split};
  const plan::PassCosts costs = plan::work_of_passes(cut);
  const bool spread = split.spread_flops > 0.0;
  return plan::simulate(spread ? plan::spread_head(cut.schedule, costs) : cut.schedule, costs).efficiency();
}

Json to_json(const plan::StageSplit& split, const std::vector<plan::StagePart>& parts,
             int64_t micro_batches) {
  Json stages = Json::array();
  for (size_t stage = 0; stage < split.flops.size(); ++stage) {
    Json names = Json::array();
    for (int64_t part = split.first[stage]; part < split.first[stage + 1]; ++part)
      names.push_back(parts[static_cast<size_t>(part)].name);
    stages.push_back({{"parts", names}, {"forward_flops_per_token", split.flops[stage]}});
  }
  return {{"stages", stages}, {"efficiency_1f1b", efficiency_of(split, micro_batches)}};
}

/// `of_head`: the parameters of a head that is spread. Each stage's rank has a share of them, or a copy of
/// its share where the head is tied.
void print_split(std::string_view title, const plan::StageSplit& split,
                 const std::vector<plan::StagePart>& parts, int64_t of_head, int64_t micro_batches) {
  const auto count = static_cast<double>(split.flops.size());
  const double efficiency = efficiency_of(split, micro_batches);
  const std::vector<double> shares = split.shares();
  report::Table table({{"stage", report::Align::kRight},
                       {"from"},
                       {"to"},
                       {"work", report::Align::kRight},
                       {"parameters", report::Align::kRight}});
  for (size_t stage = 0; stage < split.flops.size(); ++stage) {
    int64_t params = of_head / std::ssize(split.flops);
    for (int64_t part = split.first[stage]; part < split.first[stage + 1]; ++part)
      params += parts[static_cast<size_t>(part)].params;
    const auto begin = static_cast<size_t>(split.first[stage]),
               end = static_cast<size_t>(split.first[stage + 1]);
    table.add_row({std::to_string(stage), parts[begin].name, parts[end - 1].name,
                   fmt::format("{:.1f}%", 100.0 * shares[stage]),
                   fmt::format("{:.1f}M", 1e-6 * static_cast<double>(params))});
  }
  const auto busiest = std::ranges::max_element(shares) - shares.begin();
  const double share = shares[static_cast<size_t>(busiest)];
  fmt::print("{}: 1f1b with {} micro-batches is {:.1f}% busy\n{}", title, micro_batches, 100.0 * efficiency,
             table.to_string());
  if (share * count > 1.05) {
    fmt::print(
        "stage {} has {:.1f}% of the work, but an equal share would be {:.1f}%: with any schedule, ranks are "
        "at most {:.1f}% busy\n",
        busiest, 100.0 * share, 100.0 / count, 100.0 / (share * count));
  }
}

int stages(const StageOptions& options, const Front& front) {
  std::vector<std::string> overrides = front.overrides;
  if (options.spread_head) overrides.emplace_back("pipeline.spread_head=true");
  plan::ResolvedConfig resolved =
      plan::load({.path = options.config, .text = "", .overrides = overrides}, front.environment);
  settle_tokenizer(resolved, options.config);
  say_notes(resolved);
  const plan::Config& config = resolved.config;
  const plan::ModelConfig model = plan::complete(config.model, config.data.seq_len);
  const plan::ModelFacts facts = plan::describe(model, config.data.seq_len, config.precision, config.memory);
  const bool spreads = config.pipeline.spread_head;
  const auto parts = plan::stage_parts(model, facts, spreads);
  const double spread = spreads ? plan::head_flops(model) : 0.0;
  const plan::StageSplit even = plan::split_evenly(parts, options.stages, spread),
                         best = plan::split_by_cost(parts, options.stages, spread);
  if (options.json) {
    fmt::print("{}\n", Json{{"schema", "trireme.stages/1"},
                            {"micro_batches", options.micro_batches},
                            {"even", to_json(even, parts, options.micro_batches)},
                            {"by_cost", to_json(best, parts, options.micro_batches)}}
                           .dump(2));
    return 0;
  }
  const int64_t of_head = spreads ? model.vocab_size * model.d_model : 0;
  print_split("equal numbers of blocks", even, parts, of_head, options.micro_batches);
  if (even.first == best.first) return 0;
  print_split("\ncut by cost", best, parts, of_head, options.micro_batches);
  return 0;
}

void add_stages(CLI::App& verb, Front& front) {
  auto options = std::make_shared<StageOptions>();
  CLI::App* cut = verb.add_subcommand("stages", "Show how a model is cut into stages, and how busy they are");
  add_config_file(*cut, options->config);
  cut->add_option("-n,--ranks,--stages", options->stages,
                  with_default("Ranks of the pipeline, with a stage each", options->stages))
      ->check(CLI::Range(1, 1024));
  cut->add_option("--micro-batches", options->micro_batches,
                  with_default("Micro-batches per step", options->micro_batches))
      ->check(CLI::Range(1, 4096));
  cut->add_flag("--spread-head", options->spread_head,
                "Every rank computes a share of the vocabulary (pipeline.spread_head)");
  cut->add_flag("--json", options->json, "Print one JSON document");
  cut->footer(
      "Any config key can be given as --section.key=value.\n"
      "Example:\n"
      "  trireme pipeline stages --model.preset=mini-gpt-153m --stages 4");
  cut->callback([options, &front] { front.action = [options, &front] { return stages(*options, front); }; });
}

/// CLI11's own checks let "nan" pass, and infinite times have no order.
CLI::Validator number(bool positive, double most = 1e12) {
  const auto check = [positive, most](std::string& text) {
    double given = 0.0;
    const bool is_good = CLI::detail::lexical_cast(text, given) && given >= 0.0 && given <= most &&
                         !(positive && given == 0.0);
    return is_good ? std::string()
                   : fmt::format("'{}' is not a {} {:g}", text,
                                 positive ? "positive number up to" : "number from 0 to", most);
  };
  return CLI::Validator(check, "");
}

void add_shape(CLI::App& verb, PipelineOptions& options) {
  verb.add_option("-n,--ranks,--stages", options.shape.ranks,
                  with_default("Ranks of the pipeline", options.shape.ranks))
      ->check(CLI::Range(1, 1024));
  verb.add_option("--micro-batches", options.shape.micro_batches,
                  with_default("Micro-batches per step", options.shape.micro_batches))
      ->check(CLI::Range(1, 4096));
  verb.add_option(
          "--chunks", options.chunks,
          fmt::format("Stages per rank, for interleaved_1f1b, interleaved_zb and looped_bfs (default: "
                      "{}), and for greedy in a loop (default: 1)",
                      plan::PipelineConfig{}.chunks))
      ->option_text("N")
      ->check(CLI::Range(1, 64));
  verb.add_option("--costs", options.costs,
                  "F,I,W: time of a rank per micro-batch for forward, backward for the input, and backward "
                  "for the weights (default: 1,1,1)")
      ->delimiter(',')
      ->expected(3)
      ->check(number(/*positive=*/true));
  verb.add_option("--transfer", options.transfer, "Transfer time from one rank to the next (default: 0)")
      ->check(number(/*positive=*/false));
  verb.add_option("--overlap", options.overlap,
                  "Share of the sum of their times that a forward and a backward pass take which a schedule "
                  "overlaps, such as dualpipe (default: 0, one runs after the other)")
      ->check(number(/*positive=*/false, /*most=*/1.0));
  verb.add_option(
          "--limit", options.limit,
          "Limit of the activations on a rank, in micro-batches of all its stages; a schedule above "
          "it is refused, or left out of the comparison, and greedy stays within it (default: 0, no limit)")
      ->check(number(/*positive=*/false));
  verb.add_option("--head", options.head,
                  "Time of the whole head per micro-batch, forward and backward, spread over the ranks by "
                  "vocabulary (default: 0, the head is part of --costs)")
      ->check(number(/*positive=*/false));
  verb.add_flag("--json", options.json, "Print one JSON document");
}

/// A file has its own ranks, micro-batches and stages.
void refuse_shape_of_file(const CLI::App& verb) {
  for (const char* name : {"--ranks", "--micro-batches", "--chunks"}) {
    if (verb.get_option(name)->count() == 0) continue;
    throw UsageError(
        fmt::format("[cli.pipeline] {} has no effect with --from, whose file has a line for each "
                    "rank and all of its passes",
                    name),
        fmt::format("remove {}, or name a schedule instead of --from", name));
  }
}

}  // namespace

void add_pipeline(CLI::App& app, Front& front) {
  CLI::App* verb = app.add_subcommand("pipeline", "Simulate, draw and compare pipeline schedules");
  verb->require_subcommand(1);
  auto options = std::make_shared<PipelineOptions>();
  CLI::App* drawn = verb->add_subcommand("show", "Draw one schedule over time");
  drawn->add_option("SCHEDULE", options->schedule, "Schedule that 'pipeline compare' lists")
      ->option_text(" ");
  add_shape(*drawn, *options);
  drawn->add_option("--from", options->file,
                    "Your own schedule: one line per rank, with passes such as 2F3 separated by commas");
  drawn
      ->add_option("--placement", options->placement,
                   with_default("Placement of stages on ranks: loop, v or two_ways", options->placement))
      ->check(CLI::IsMember({"loop", "v", "two_ways", "two-ways"}));
  drawn->add_option("--svg", options->svg, "Also write the picture to this file");
  drawn
      ->add_option("--columns", options->columns, "Width of the text (default: that of the terminal, or 200)")
      ->option_text("N")
      ->check(CLI::Range(40, 10000));
  drawn->add_flag("--csv", options->csv, "Print the passes in the form that --from reads")
      ->excludes("--json");
  drawn->callback([options, drawn, &front] {
    front.action = [options, drawn] {
      if (options->csv && options->head > 0.0)
        throw UsageError("--csv writes the passes of stages only, but --head adds others",
                         "remove --head: --from and pipeline.spread_head add its passes again");
      if (options->schedule.empty() == options->file.empty())
        throw UsageError("give one schedule, or a file with --from",
                         "'trireme pipeline compare' lists the names");
      if (!options->file.empty()) refuse_shape_of_file(*drawn);
      return show(*options);
    };
  });
  auto compared = std::make_shared<PipelineOptions>();
  CLI::App* table = verb->add_subcommand("compare", "Compare all schedules for the same costs");
  add_shape(*table, *compared);
  table->callback([compared, &front] { front.action = [compared] { return compare(*compared); }; });
  add_stages(*verb, front);
}

}  // namespace trireme::cli
