// Policies x micro-batches of one config: how many tokens a second each gives, and which to take.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/cli/bench_runs.h"
#include "trireme/cli/train_job.h"
#include "trireme/report/step_times.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

struct SpeedOptions {
  BenchRuns runs;
  std::vector<int64_t> micro_batches;
  int64_t rounds = 2;
};

/// One policy with one micro-batch, and what its rounds measured.
struct SpeedCase {
  plan::Policy policy;
  int64_t micro_batch = 0;
  std::vector<double> step_ms = {};   ///< of all rounds, without their warm-ups
  std::vector<double> round_ms = {};  ///< the median step of each round
  int64_t peak_bytes = 0;
  bool out_of_memory = false;

  std::optional<double> tokens_per_s(int64_t step_tokens) const {
    const auto ms = out_of_memory ? std::nullopt : report::median(round_ms);
    return ms ? std::optional(1e3 * static_cast<double>(step_tokens) / *ms) : std::nullopt;
  }
  /// The interval of the rounds, not of steps: steps of one run are alike, since what slows one slows its
  /// neighbours.
  report::Interval interval(int64_t step_tokens) const {
    const report::Interval ms = report::median_interval(round_ms).value_or(report::Interval{});
    const auto tokens = 1e3 * static_cast<double>(step_tokens);
    return {.low = tokens / ms.high, .high = tokens / ms.low};
  }
};

/// The micro-batch that the config leads to, and half and a quarter of it as far as they are whole.
std::vector<int64_t> usual_micro_batches(const plan::BatchPlan& batch) {
  std::vector<int64_t> sizes;
  for (int64_t size = batch.micro_batch; size >= 1 && sizes.size() < 3; size /= 2) {
    sizes.push_back(size);
    if (size % 2 != 0) break;
  }
  return sizes;
}

std::vector<SpeedCase> cases_of(const SpeedOptions& options, const plan::BatchPlan& batch) {
  std::vector<SpeedCase> cases;
  const auto sizes = options.micro_batches.empty() ? usual_micro_batches(batch) : options.micro_batches;
  for (const int64_t size : sizes) plan::plan_batch(batch.global_batch, size, batch.dp_size);  // may refuse
  for (const plan::Policy& policy : policies_of(options.runs)) {
    for (const int64_t size : sizes) cases.push_back({.policy = policy, .micro_batch = size});
  }
  return cases;
}

BenchRun run_of(const SpeedCase& one, const SpeedOptions& options, int64_t round) {
  BenchRun run{.label = fmt::format("{}, micro-batch {}, round {} of {}", one.policy.label(), one.micro_batch,
                                    round, options.rounds),
               .overrides = overrides_of(one.policy)};
  run.overrides.push_back(fmt::format("train.micro_batch={}", one.micro_batch));
  run.overrides.emplace_back("pipeline.micro_batches=0");
  return run;
}

/// The runs of the first round.
std::vector<BenchRun> runs_of(const std::vector<SpeedCase>& cases, const SpeedOptions& options) {
  std::vector<BenchRun> runs;
  for (const SpeedCase& one : cases) runs.push_back(run_of(one, options, 1));
  return runs;
}

/// Rounds take turns over the cases, so that a machine that grows slower does so for all. Returns the exit
/// code of a run that failed otherwise than by memory, else 0.
int measure(std::vector<SpeedCase>& cases, const SpeedOptions& options, Front& front) {
  for (int64_t round = 1; round <= options.rounds; ++round) {
    for (SpeedCase& one : cases) {
      if (one.out_of_memory) continue;
      const BenchResult result = train_once(run_of(one, options, round), options.runs, front);
      one.out_of_memory = result.code == static_cast<int>(ExitCode::kOutOfMemory);
      if (one.out_of_memory) continue;
      if (result.code != 0) return result.code;
      const std::vector<double> steps = report::steady_step_ms(result.run_directory);
      one.step_ms.insert(one.step_ms.end(), steps.begin(), steps.end());
      if (const auto middle = report::median(steps)) one.round_ms.push_back(*middle);
      one.peak_bytes = std::max(one.peak_bytes, report::read_cost(result.run_directory, "").peak_bytes);
    }
  }
  return 0;
}

/// The case to take: of the fastest one and those as fast, that with the smallest peak. As fast is one whose
/// median lies in the fastest one's interval, and no more than 5% below its median. None: nothing ran.
const SpeedCase* recommended(const std::vector<SpeedCase>& cases, int64_t step_tokens) {
  const auto speed = [&](const SpeedCase& one) { return one.tokens_per_s(step_tokens).value_or(0.0); };
  const auto fastest = std::ranges::max_element(cases, {}, speed);
  if (fastest == cases.end() || speed(*fastest) == 0.0) return nullptr;
  const double enough = std::max(fastest->interval(step_tokens).low, 0.95 * speed(*fastest));
  const SpeedCase* best = &*fastest;
  for (const SpeedCase& one : cases) {
    if (speed(one) >= enough && one.peak_bytes < best->peak_bytes) best = &one;
  }
  return best;
}

std::string settings_of(const SpeedCase& one) {
  return fmt::format("--parallel.policy={} --train.micro_batch={}", one.policy.label(), one.micro_batch);
}

std::string recommendation(const SpeedCase& best, int64_t step_tokens) {
  const report::Interval interval = best.interval(step_tokens);
  return fmt::format(
      "recommended: {}  ({} tok/s, {} to {}, peak {}: of the fastest, the one with the least memory)\n",
      settings_of(best), format_count(*best.tokens_per_s(step_tokens)), format_count(interval.low),
      format_count(interval.high), format_bytes(static_cast<double>(best.peak_bytes)));
}

/// `best` may be null: then no case is recommended.
void print_table(const std::vector<SpeedCase>& cases, const SpeedCase* best, int64_t step_tokens,
                 int64_t rounds) {
  using report::Align;
  report::Table table({{"policy"},
                       {"micro-batch", Align::kRight},
                       {"tok/s", Align::kRight},
                       {rounds < report::kLeastForInterval ? "from" : "95% from", Align::kRight},
                       {"to", Align::kRight},
                       {"step ms", Align::kRight},
                       {"steps", Align::kRight},
                       {"peak", Align::kRight}});
  for (const SpeedCase& one : cases) {
    if (one.out_of_memory) {
      table.add_row(
          {one.policy.label(), std::to_string(one.micro_batch), "out of memory", "", "", "", "", ""});
      continue;
    }
    const report::Interval interval = one.interval(step_tokens);
    table.add_row({one.policy.label(), std::to_string(one.micro_batch),
                   format_count(*one.tokens_per_s(step_tokens)), format_count(interval.low),
                   format_count(interval.high), fmt::format("{:.1f}", *report::median(one.round_ms)),
                   std::to_string(one.step_ms.size()), format_bytes(static_cast<double>(one.peak_bytes))});
  }
  fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
  if (best != nullptr) fmt::print("{}", recommendation(*best, step_tokens));
}

Json to_json(const SpeedCase& one, int64_t step_tokens) {
  Json row = {
      {"policy", one.policy.label()}, {"micro_batch", one.micro_batch}, {"out_of_memory", one.out_of_memory},
      {"tokens_per_s", Json()},       {"tokens_per_s_low", Json()},     {"tokens_per_s_high", Json()},
      {"peak_bytes", Json()},         {"round_ms", one.round_ms},       {"step_ms", one.step_ms}};
  if (one.out_of_memory) return row;
  const report::Interval interval = one.interval(step_tokens);
  row["tokens_per_s"] = *one.tokens_per_s(step_tokens);
  row["tokens_per_s_low"] = interval.low;
  row["tokens_per_s_high"] = interval.high;
  row["peak_bytes"] = one.peak_bytes;
  return row;
}

void print_json(const std::vector<SpeedCase>& cases, const SpeedCase* best, int64_t step_tokens,
                const std::string& command) {
  Json document = {{"schema", "trireme.bench_speed/1"},
                   {"command", command},
                   {"tokens_per_step", step_tokens},
                   {"rows", Json::array()},
                   {"recommended", Json()}};
  for (const SpeedCase& one : cases) document["rows"].push_back(to_json(one, step_tokens));
  if (best != nullptr)
    document["recommended"] = {{"policy", best->policy.label()}, {"micro_batch", best->micro_batch}};
  fmt::print("{}\n", document.dump(2));
}

int bench_speed(const SpeedOptions& options, Front& front) {
  const PreparedJob prepared = prepare(options.runs, front);
  std::vector<SpeedCase> cases = cases_of(options, prepared.plan.batch);
  check_runs(runs_of(cases, options), options.runs, front);
  const int code = measure(cases, options, front);
  std::erase_if(cases, [](const SpeedCase& one) { return !one.out_of_memory && one.round_ms.empty(); });
  if (cases.empty()) return code;
  const int64_t step_tokens = prepared.plan.batch.global_batch * prepared.config.config.data.seq_len;
  // Cases that were not measured as often as others, or not at all, cannot be told from slower ones.
  const SpeedCase* const best = code == 0 ? recommended(cases, step_tokens) : nullptr;
  if (options.runs.json) {
    print_json(cases, best, step_tokens, front.command);
  } else {
    print_table(cases, best, step_tokens, options.rounds);
  }
  if (code != 0) return code;
  const bool none_ran = std::ranges::all_of(cases, &SpeedCase::out_of_memory);
  return static_cast<int>(none_ran ? ExitCode::kOutOfMemory : ExitCode::kOk);
}

}  // namespace

void add_bench_speed(CLI::App& bench, Front& front) {
  auto options = std::make_shared<SpeedOptions>();
  CLI::App* speed = bench.add_subcommand(
      "speed", "Measure tokens/s of each policy and micro-batch, each in its own ranks, and recommend one");
  add_options(*speed, options->runs);
  speed
      ->add_option("--micro-batch-sizes", options->micro_batches,
                   "Separated by commas (default: that of the config, half and a quarter of it)")
      ->delimiter(',')
      ->option_text("LIST")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  speed->add_option("--rounds", options->rounds, "Runs of each case, alternating (default: 2)")
      ->option_text("N")
      ->check(CLI::Range(1, 1000));
  speed->footer(
      "The global batch is that of the config. The speed of a round is the median over its steps without "
      "the\n"
      "first quarter; tok/s is the median of the rounds, 'from' and 'to' are the slowest and the fastest "
      "round,\n"
      "or the bounds of a 95% interval with six rounds or more. See docs/performance.md.\n"
      "Every case is checked before the first one runs. If a run fails, what was measured is printed without "
      "a\n"
      "recommendation, and the exit code is that of the failure.\n"
      "Any config key can be given as --section.key=value.\n"
      "Example:\n"
      "  trireme bench speed configs/quickstart.yaml --policies ddp,zero2 --micro-batch-sizes 4,8");
  speed->callback(
      [options, &front] { front.action = [options, &front] { return bench_speed(*options, front); }; });
}

}  // namespace trireme::cli
