// trireme bench compare, expectations and export: what can be done with results that are there.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/clock.h"
#include "trireme/base/file.h"
#include "trireme/base/terminal.h"
#include "trireme/bench/results_text.h"
#include "trireme/cli/bench_expectations.h"
#include "trireme/report/run_dir.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string interval_text(const report::Interval& interval, const char* form) {
  if (interval.low == 0.0 && interval.high == 0.0) return "-";
  return fmt::format("{} to {}", fmt::format(fmt::runtime(form), interval.low),
                     fmt::format(fmt::runtime(form), interval.high));
}

std::string held_text(const bench::Held& held) {
  if (!held.is_known) return "new";
  if (held.slower && held.less) return "slower, and a smaller ratio";
  if (held.slower) return "slower";
  if (held.less) return "a smaller ratio";
  if (held.now.ms.high < held.before.ms.low) return "faster";
  return "as before";
}

std::string held_table(const std::vector<bench::Held>& all) {
  using report::Align;
  report::Table table({{"target"},
                       {"arm"},
                       {"ms/step before", Align::kRight},
                       {"now", Align::kRight},
                       {"ratio before", Align::kRight},
                       {"now", Align::kRight},
                       {"verdict"}});
  for (const bench::Held& held : all)
    table.add_row({held.now.target, held.now.arm, interval_text(held.before.ms, "{:.2f}"),
                   interval_text(held.now.ms, "{:.2f}"), interval_text(held.before.ratio, "{:.3f}"),
                   interval_text(held.now.ratio, "{:.3f}"), held_text(held)});
  return table.to_string(terminal_columns(STDOUT_FILENO));
}

Json held_json(const std::vector<bench::Held>& all) {
  Json rows = Json::array();
  for (const bench::Held& held : all) {
    const auto interval = [](const report::Interval& of) { return Json{{"low", of.low}, {"high", of.high}}; };
    rows.push_back({{"target", held.now.target},
                    {"mode", held.now.mode},
                    {"arm", held.now.arm},
                    {"ms", {{"before", interval(held.before.ms)}, {"now", interval(held.now.ms)}}},
                    {"ratio", {{"before", interval(held.before.ratio)}, {"now", interval(held.now.ratio)}}},
                    {"verdict", held_text(held)}});
  }
  return {{"schema", "trireme.bench_compare/1"}, {"arms", rows}};
}

struct CompareOptions {
  std::string before, now;
  bool force = false, json = false;
};

/// Differences between two benches for which they cannot be compared, though both may be looked at.
void refuse_other_hardware(const bench::Results& before, const bench::Results& now, bool force) {
  if (before.machine.hardware() == now.machine.hardware() || force) return;
  throw ConfigError(
      "[cli.bench] the results are of different hardware ({}, and {}); --force compares them all the same",
      before.machine.hardware(), now.machine.hardware());
}

int bench_compare(const CompareOptions& options) {
  const bench::Results before = bench::read_results(options.before), now = bench::read_results(options.now);
  refuse_other_hardware(before, now, options.force);
  std::vector<bench::Expectation> accepted = bench::expectations_of(before, options.before, before.started);
  for (bench::Expectation& one : accepted) one.hardware = now.machine.hardware();
  const auto all = bench::hold_against(accepted, bench::expectations_of(now, options.now, now.started));
  if (options.json) {
    fmt::print("{}\n", held_json(all).dump(2));
  } else {
    fmt::print("{}", held_table(all));
  }
  return 0;
}

struct ExpectationOptions {
  std::string results, file;
  bool json = false;
};

std::string expectations_file(const std::string& given, const Front& front) {
  return given.empty() ? front.runs_root() + "/bench/expectations.json" : given;
}

int accept(const ExpectationOptions& options, const Front& front) {
  const std::string file = expectations_file(options.file, front);
  const auto more =
      bench::expectations_of(bench::read_results(options.results), options.results, utc_timestamp());
  if (more.empty())
    throw ConfigError("[cli.bench] {} has no measured target that could be accepted; see its report.md",
                      options.results);
  bench::write_expectations(file, bench::merged(bench::read_expectations(file), more));
  fmt::print("accepted {} arms in {}\n", more.size(), report::as_typed(file));
  return 0;
}

int show(const ExpectationOptions& options, const Front& front) {
  const auto all = bench::read_expectations(expectations_file(options.file, front));
  Json rows = Json::array();
  report::Table table({{"hardware"}, {"target"}, {"arm"}, {"ms/step"}, {"ratio"}, {"accepted"}, {"commit"}});
  for (const bench::Expectation& one : all) {
    rows.push_back({{"hardware", one.hardware},
                    {"target", one.target},
                    {"mode", one.mode},
                    {"arm", one.arm},
                    {"ms_low", one.ms.low},
                    {"ms_high", one.ms.high},
                    {"ratio_low", one.ratio.low},
                    {"ratio_high", one.ratio.high},
                    {"accepted", one.accepted},
                    {"commit", one.commit}});
    table.add_row({one.hardware, one.target, one.arm, interval_text(one.ms, "{:.2f}"),
                   interval_text(one.ratio, "{:.3f}"), one.accepted, one.commit});
  }
  if (options.json) {
    fmt::print("{}\n", Json{{"schema", "trireme.bench_expectations/1"}, {"arms", rows}}.dump(2));
  } else {
    fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
  }
  return 0;
}

struct WrittenForm {
  std::string form, results, output;
};

int bench_export(const WrittenForm& options) {
  const bench::Results results = bench::read_results(options.results);
  std::string text = bench::to_json_text(results);
  if (options.form == "csv") text = bench::to_csv(results);
  if (options.form == "md") text = bench::to_markdown(results);
  if (options.output.empty()) {
    fmt::print("{}", text);
  } else {
    write_file_atomic(options.output, text);
  }
  return 0;
}

void add_compare(CLI::App& bench, Front& front) {
  auto options = std::make_shared<CompareOptions>();
  CLI::App* verb =
      bench.add_subcommand("compare", "Compare the results of two benches on one kind of hardware");
  verb->add_option("BEFORE", options->before, "Folder of the earlier results")->required()->option_text(" ");
  verb->add_option("NOW", options->now, "Folder of the later ones")->required()->option_text(" ");
  verb->add_flag("--force", options->force, "Compare results of different hardware");
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Intervals that overlap are 'as before'.\nExample:\n  trireme bench compare runs/bench/a runs/bench/b");
  verb->callback([options, &front] { front.action = [options] { return bench_compare(*options); }; });
}

void add_expectations(CLI::App& bench, Front& front) {
  CLI::App* verb =
      bench.add_subcommand("expectations", "What is usual on a machine, for 'bench run --check'");
  verb->require_subcommand(1);
  const auto add = [&](const char* name, const char* help, bool takes_results, auto action) {
    auto options = std::make_shared<ExpectationOptions>();
    CLI::App* one = verb->add_subcommand(name, help);
    if (takes_results)
      one->add_option("RESULTS", options->results, "Folder of the results")->required()->option_text(" ");
    else
      one->add_flag("--json", options->json, "Print one JSON document");
    one->add_option("--expectations", options->file, "File (default: RUNS/bench/expectations.json)")
        ->option_text("FILE");
    one->callback([options, action, &front] {
      front.action = [options, action, &front] { return action(*options, front); };
    });
  };
  add("show", "List what was accepted", false, show);
  add("accept", "Accept the measured targets of a bench as usual for its hardware", true, accept);
}

void add_results_export(CLI::App& bench, Front& front) {
  auto options = std::make_shared<WrittenForm>();
  CLI::App* verb = bench.add_subcommand("export", "Write results in another form");
  verb->add_option("FORM", options->form, "csv: every step of every run; md: the report; json: all")
      ->required()
      ->option_text(" ")
      ->check(CLI::IsMember({"csv", "md", "json"}));
  verb->add_option("RESULTS", options->results, "Folder of the results")->required()->option_text(" ");
  verb->add_option("-o,--output", options->output, "File (default: stdout)")->option_text("FILE");
  verb->footer("Example:\n  trireme bench export csv runs/bench/results-20261127-120000Z");
  verb->callback([options, &front] { front.action = [options] { return bench_export(*options); }; });
}

}  // namespace

void read_expectations_early(const std::string& file, const Front& front) {
  if (!file.empty() && !std::filesystem::exists(file))
    throw ConfigError(
        "[cli.bench] --expectations {} does not exist; name a file of 'trireme bench expectations accept'",
        file);
  bench::read_expectations(expectations_file(file, front));
}

int check_expectations(const bench::Results& results, const std::string& file, const Front& front) {
  const auto accepted = bench::read_expectations(expectations_file(file, front));
  const auto all = bench::hold_against(accepted, bench::expectations_of(results, "", ""));
  fmt::print(stderr, "{}", held_table(all));
  if (std::ranges::none_of(all, &bench::Held::is_known)) {
    fmt::print(
        stderr,
        "--check: nothing was accepted for these arms on this hardware ({}); 'trireme bench expectations "
        "accept' does\n",
        results.machine.hardware());
    return static_cast<int>(ExitCode::kEnvironment);
  }
  const bool worse = std::ranges::any_of(all, [](const bench::Held& held) { return held.is_regression(); });
  return worse ? static_cast<int>(ExitCode::kComparison) : 0;
}

void add_bench_results(CLI::App& bench, Front& front) {
  add_compare(bench, front);
  add_expectations(bench, front);
  add_results_export(bench, front);
}

}  // namespace trireme::cli
