#include "trireme/report/run_figures.h"

#include <algorithm>
#include <charconv>

#include "trireme/base/error.h"

namespace trireme::report {
namespace {

bool was_heeded(int code) {
  return code == static_cast<int>(ExitCode::kPreempted) || is_stop_code(code);
}

std::optional<AtStep> last_of(const Curve& curve) {
  if (curve.empty()) return std::nullopt;
  return AtStep{curve.y.back(), curve.x.back()};
}

/// The first of the smallest, or largest, values that are numbers.
std::optional<AtStep> extreme_of(const Curve& curve, bool smallest) {
  std::optional<AtStep> best;
  for (size_t i = 0; i < curve.size(); ++i) {
    const double value = curve.y[i];
    if (value != value) continue;
    if (!best || (smallest ? value < best->value : value > best->value)) best = AtStep{value, curve.x[i]};
  }
  return best;
}

std::optional<int64_t> whole_number(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Steps after which the run began or went on, ascending.
std::vector<double> beginnings(const RunRecord& run) {
  std::vector<double> steps = {0.0};
  for (const Attempt& attempt : run.attempts) {
    if (attempt.resumed_from) steps.push_back(static_cast<double>(*attempt.resumed_from));
  }
  std::ranges::sort(steps);
  return steps;
}

}  // namespace

RunState state_of_run(const RunRecord& run) {
  const auto& code = run.last_attempt().exit_code;
  if (!code) return run.running ? RunState::kRunning : RunState::kNoEnd;
  if (*code == 0) return RunState::kFinished;
  return was_heeded(*code) ? RunState::kInterrupted : RunState::kFailed;
}

std::string state_name(RunState state) {
  switch (state) {
    case RunState::kFinished:
      return "finished";
    case RunState::kInterrupted:
      return "interrupted";
    case RunState::kFailed:
      return "failed";
    case RunState::kRunning:
      return "running";
    case RunState::kNoEnd:
      return "no end recorded";
  }
  return "";
}

std::vector<double> settled_values(const RunRecord& run, const Curve& curve) {
  constexpr std::ptrdiff_t kWarmUp = 10;
  const std::vector<double> starts = beginnings(run);
  const std::vector<double>& steps = run.metrics.steps;
  std::vector<double> settled;
  for (size_t i = 0; i < starts.size(); ++i) {
    const auto after = [&](double step) { return std::ranges::upper_bound(steps, step); };
    const auto first = after(starts[i]), last = i + 1 < starts.size() ? after(starts[i + 1]) : steps.end();
    const std::ptrdiff_t skipped = std::min(kWarmUp, (last - first) / 2);
    if (first + skipped >= last) continue;
    const auto from = std::ranges::lower_bound(curve.x, *(first + skipped)),
               to = std::ranges::upper_bound(curve.x, *(last - 1));
    settled.insert(settled.end(), curve.y.begin() + (from - curve.x.begin()),
                   curve.y.begin() + (to - curve.x.begin()));
  }
  return settled;
}

bool top5_tells(const RunRecord& run) {
  constexpr int64_t kGuesses = 5;
  return whole_number(run.config_value("model.classes")).value_or(kGuesses + 1) > kGuesses;
}

RunFigures figures_of(const RunRecord& run) {
  const Metrics& metrics = run.metrics;
  const auto settled = [&](const char* key) { return settled_values(run, metrics.curve(key)); };
  RunFigures figures;
  if (!metrics.steps.empty()) figures.steps = static_cast<int64_t>(metrics.steps.back());
  // With epochs the data decides how many steps there are, and only the run knows it.
  if (whole_number(run.config_value("train.epochs")).value_or(0) == 0)
    figures.total_steps = whole_number(run.config_value("train.steps"));
  if (const auto loss = last_of(metrics.curve("loss"))) figures.loss = loss->value;
  figures.val_loss = last_of(metrics.curve("val_loss"));
  figures.best_val_loss = extreme_of(metrics.curve("val_loss"), true);
  figures.val_top1 = last_of(metrics.curve("val_top1"));
  if (top5_tells(run)) figures.val_top5 = last_of(metrics.curve("val_top5"));
  figures.best_val_top1 = extreme_of(metrics.curve("val_top1"), false);
  figures.tokens_per_s = quantile(settled("tokens_per_s"), 0.5);
  if (figures.tokens_per_s) {
    figures.tokens_range = {.low = *quantile(settled("tokens_per_s"), 0.05),
                            .high = *quantile(settled("tokens_per_s"), 0.95)};
  }
  const std::vector<double> step_ms = settled("step_ms");
  figures.timed_steps = std::ssize(step_ms);
  figures.step_ms = quantile(step_ms, 0.5);
  figures.step_ms_p95 = quantile(step_ms, 0.95);
  figures.communication_ms = quantile(settled("communication_ms"), 0.5);
  figures.exposed_ms = quantile(settled("exposed_ms"), 0.5);
  figures.exposed_share = quantile(settled("communication_share"), 0.5);
  if (const auto tokens = last_of(metrics.curve("tokens")))
    figures.tokens = static_cast<int64_t>(tokens->value);
  if (const auto peak = extreme_of(metrics.curve("peak_bytes"), false))
    figures.peak_bytes = static_cast<int64_t>(peak->value);
  if (run.summary) {
    figures.peak_bytes = std::max(figures.peak_bytes, run.summary->peak_bytes);
    figures.wall_s = run.summary->wall_s;
    figures.weights_digest = run.summary->weights_digest;
    figures.why_bits_vary = run.summary->why_bits_vary;
    if (!figures.loss) figures.loss = run.summary->final_loss;
  }
  return figures;
}

}  // namespace trireme::report
