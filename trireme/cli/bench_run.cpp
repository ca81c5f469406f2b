// trireme bench run: measures targets, or a config of the user's own, and says what was found.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>

#include "trireme/base/clock.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/bench/results_page.h"
#include "trireme/bench/results_text.h"
#include "trireme/cli/bench_expectations.h"
#include "trireme/cli/bench_session.h"
#include "trireme/cli/folder_check.h"
#include "trireme/report/run_dir.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

struct RunOptions {
  LabOptions lab;
  std::string out, format = "both";
  std::string expectations;
  bool dry_run = false, goes_on = false, json = false, check = false;
};

std::string folder_of(const RunOptions& options, const Front& front) {
  return options.out.empty() ? fmt::format("{}/bench/results-{}", front.runs_root(), utc_compact())
                             : options.out;
}

std::string keys_text(const std::vector<std::string>& keys) {
  std::vector<std::string> words;
  for (const std::string& key : keys) words.push_back("--" + key);
  return join(words, " ");
}

/// Words for what a profile adds to a bench; empty: nothing.
std::string profile_text(const LabPlan& plan) {
  if (plan.depth < bench::Depth::kDeep) return "";
  const bool measures = plan.depth == bench::Depth::kRoofline && plan.probe.empty();
  return fmt::format(
      ", of which the profile takes {}: a run of {} steps for each arm, {} of them traced{}",
      format_duration(plan.profile_s()), kStepsBeforeTrace + kTracedSteps, kTracedSteps,
      measures ? ", and the rates of this machine (--probe takes those that are measured)" : "");
}

/// Prints the runs that would be made, arm by arm.
void print_plan(const LabPlan& plan) {
  report::Table table(
      {{"target"}, {"arm"}, {"ranks", report::Align::kRight}, {"runs", report::Align::kRight}, {"keys"}});
  for (const PlannedTarget& target : plan.targets) {
    if (target.result.state == bench::State::kSkipped) {
      table.add_row({target.result.name, "skipped", "", "", target.result.reason});
      continue;
    }
    for (size_t i = 0; i < target.arms.size(); ++i)
      table.add_row({target.result.name, target.result.arms[i].name, std::to_string(target.arm_ranks[i]),
                     std::to_string(2 * target.result.blocks), keys_text(target.arms[i].overrides)});
  }
  fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
  fmt::print("on {}, roughly {}{}\n", plan.device, format_duration(plan.estimated_s()), profile_text(plan));
}

/// The results that --continue goes on from, whose options are those of the first time.
bench::Results earlier_results(RunOptions& options) {
  if (options.out.empty())
    throw ConfigError("[cli.bench] --continue needs --out DIR, the folder of what is to go on");
  if (to_json(options.lab) != to_json(LabOptions()))
    throw ConfigError(
        "[cli.bench] --continue goes on with the options of the first time; remove all but --out, --format, "
        "--json "
        "and --check");
  bench::Results earlier = bench::read_results(options.out);
  options.lab = lab_options_from(earlier.request);
  return earlier;
}

/// Before the first run, of which nothing could be kept.
void check_folder(const std::string& folder) {
  if (!can_hold_files(folder)) {
    throw EnvironmentError(
        "[cli.bench] results cannot be written to {}: {} is no folder in which this user may write; name "
        "another one by "
        "--out",
        folder, existing_parent(folder).string());
  }
  if (!std::filesystem::exists(folder + "/results.json")) return;
  throw ConfigError("[cli.bench] {} has the results of an earlier bench; use --continue, or another folder",
                    folder);
}

void write_reports(const bench::Results& results, const std::string& folder, const std::string& format) {
  const auto is = [&](const char* one) { return format == one || format == "both"; };
  if (is("markdown")) write_file_atomic(folder + "/report.md", bench::to_markdown(results));
  if (is("html")) write_file_atomic(folder + "/report.html", bench::to_page(results));
}

void print_results(const bench::Results& results, const RunOptions& options, const std::string& folder) {
  if (options.json) {
    fmt::print("{}", bench::to_json_text(results));
    return;
  }
  fmt::print("{}", bench::to_text(results, terminal_columns(STDOUT_FILENO)));
  fmt::print("results  {}\n", report::as_typed(folder));
}

int bench_run(RunOptions options, Front& front) {
  if (!options.check && !options.expectations.empty())
    throw UsageError("[cli.bench] --expectations is for --check", "add --check, or leave it out");
  if (options.check) read_expectations_early(options.expectations, front);
  options.lab.overrides = front.overrides;
  const std::string folder = folder_of(options, front);
  std::optional<bench::Results> earlier;
  if (options.goes_on) {
    earlier = earlier_results(options);
  } else {
    check_folder(folder);
  }
  const LabPlan plan = plan_lab(options.lab, front);
  if (options.dry_run) {
    print_plan(plan);
    return 0;
  }
  bench::Results results = new_results(options.lab, plan, front);
  if (earlier) take_over(results, *earlier);
  log_info("bench: {} target{} on {}, roughly {}; results in {}", plan.targets.size(),
           plan.targets.size() == 1 ? "" : "s", plan.device, format_duration(plan.estimated_s()),
           report::as_typed(folder));
  BenchSession session(plan, front, folder, std::move(results));
  const int stopped = session.run();
  write_reports(session.results(), folder, options.format);
  print_results(session.results(), options, folder);
  if (stopped == 0) {
    const int code = bench::exit_code(session.results());
    const bool checks = options.check && code == 0;
    return checks ? check_expectations(session.results(), options.expectations, front) : code;
  }
  log_info("bench: stopped; 'trireme bench run --continue --out {}' goes on", report::as_typed(folder));
  return stopped;
}

void add_measuring(CLI::App& verb, LabOptions& lab) {
  constexpr int64_t kMost = 1'000'000;
  verb.add_option(
          "--profile", lab.profile,
          with_default("none: times alone; minimal: also memory, bytes sent and waiting; deep: also a traced "
                       "run of each arm, with time by kind of kernel; roofline: also the FLOPs and bytes of "
                       "each kind, beside what this machine was measured to do",
                       lab.profile))
      ->option_text("DEPTH");
  verb.add_option("--probe", lab.probe,
                  "With --profile roofline, rates that 'trireme doctor --probe FILE' has measured (default: "
                  "they are measured once, for up to two minutes)")
      ->option_text("FILE");
  verb.add_option("--mode", lab.mode,
                  with_default(
                      "declared: one thing is different; documents: what published scripts call baseline and "
                      "optimized, where several things are",
                      lab.mode))
      ->check(CLI::IsMember({"declared", "documents"}));
  verb.add_option("--iterations", lab.iterations,
                  with_default("Steps of a run that are counted", lab.iterations))
      ->option_text("N")
      ->check(CLI::Range(int64_t{1}, kMost));
  verb.add_option("--warmup", lab.warm_up, with_default("Steps before them", lab.warm_up))
      ->option_text("N")
      ->check(CLI::Range(int64_t{0}, kMost));
  verb.add_option("--replicates", lab.blocks, with_default("Blocks A B B A: two ratios each", lab.blocks))
      ->option_text("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1000}));
  verb.add_option("-n,--ranks,--nproc", lab.ranks, "Ranks (default: the target's usual number)")
      ->option_text("RANKS")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
}

void add_what(CLI::App& verb, LabOptions& lab) {
  verb.add_option("-t,--targets", lab.targets,
                  "Targets of 'bench list-targets' or chapters, separated by commas; or all")
      ->option_text("LIST");
  verb.add_option("-c,--chapter", lab.chapter, "All targets of this chapter")->option_text("NAME");
  verb.add_option("--config", lab.config, "Measure this config instead, in the ways that --arms names")
      ->option_text("FILE");
  verb.add_option("--arms", lab.arms, "A key and its values, of which the first is the reference")
      ->option_text("KEY=A,B");
  verb.add_option(
          "--target-extra-arg", lab.extra,
          "Flags of one target, as published scripts have them: 'zero3=\"--steps 8 --sequence-length 2048\"'")
      ->allow_extra_args(false)
      ->option_text("T=FLAGS");
  verb.add_option("--torchrun-env", lab.variables, "A variable for the ranks")
      ->allow_extra_args(false)
      ->option_text("KEY[=VALUE]");
}

}  // namespace

void add_bench_run(CLI::App& bench, Front& front) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* verb =
      bench.add_subcommand("run", "Measure targets: verified, in alternating runs, with intervals");
  add_what(*verb, options->lab);
  add_measuring(*verb, options->lab);
  verb->add_option("-o,--out", options->out, "Folder of the results (default: RUNS/bench/results-TIME)")
      ->option_text("DIR");
  verb->add_option(
          "--format", options->format,
          with_default("Reports beside results.json: markdown, html, both, or json alone", options->format))
      ->check(CLI::IsMember({"both", "json", "markdown", "html"}));
  verb->add_flag("--dry-run", options->dry_run, "Print what would run, and check it");
  verb->add_flag("--continue", options->goes_on,
                 "Go on with what was interrupted in --out, with the options that it was begun with");
  verb->add_flag(
      "--check", options->check,
      "Exit with 8 where an arm is slower than was accepted for this hardware, or its ratio smaller");
  verb->add_option("--expectations", options->expectations,
                   "File for --check (default: RUNS/bench/expectations.json)")
      ->option_text("FILE");
  verb->add_flag("--json", options->json, "Print results.json");
  verb->footer(
      "Any config key given as --section.key=value holds for all arms. Everything is checked before the "
      "first "
      "run.\n"
      "No ratio is given unless the arms trained the same and gave what they owe. Exit codes: 8 when that "
      "does "
      "not\n"
      "hold, 1 when a run failed, 3 when all targets were skipped. docs/guide/benchmarks.md says how it "
      "measures.\n"
      "Examples:\n"
      "  trireme bench run --targets labs/train_distributed --profile minimal\n"
      "  trireme bench run --targets zero1,zero3 -n 2 --replicates 1\n"
      "  trireme bench run --config configs/quickstart.yaml --arms parallel.policy=ddp,fsdp");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return bench_run(*options, front); }; });
}

}  // namespace trireme::cli
