#include "trireme/report/run_charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "trireme/base/text.h"
#include "trireme/report/chart.h"
#include "trireme/report/run_figures.h"

namespace trireme::report {
namespace {

/// A key of metrics.jsonl: its meaning, and how it is drawn.
struct Quantity {
  const char* key;
  const char* name;
  const char* title;
  const char* of;
  Unit unit;
  Chart::Scale scale;
  Chart::Form form = Chart::Form::kLines;
};

constexpr Quantity kLoss = {"loss", "loss", "Loss", "", Unit::kNumber, Chart::Scale::kAuto};
constexpr Quantity kValLoss = {"val_loss", "validation loss", "Validation loss",
                               "",         Unit::kNumber,     Chart::Scale::kAuto};
constexpr Quantity kTop1 = {"val_top1", "top-1",      "Validation accuracy",
                            "",         Unit::kShare, Chart::Scale::kLinear};
constexpr Quantity kTop5 = {"val_top5", "top-5",      "Validation accuracy, top-5",
                            "",         Unit::kShare, Chart::Scale::kLinear};
constexpr Quantity kLr = {"lr", "learning rate", "Learning rate", "", Unit::kNumber, Chart::Scale::kFromZero};
constexpr Quantity kGradNorm = {"grad_norm",     "gradient norm",
                                "Gradient norm", "global L2 norm before clipping",
                                Unit::kNumber,   Chart::Scale::kAuto};
constexpr Quantity kTokens = {"tokens_per_s",          "tokens/s",   "Throughput",
                              "tokens/s of all ranks", Unit::kCount, Chart::Scale::kFromZero};
constexpr Quantity kImages = {"tokens_per_s",          "images/s",   "Throughput",
                              "images/s of all ranks", Unit::kCount, Chart::Scale::kFromZero};
/// The throughput of several runs, of which some read tokens and others images.
constexpr Quantity kBoth = {"tokens_per_s", "tokens/s or images/s",
                            "Throughput",   "tokens/s or images/s of all ranks",
                            Unit::kCount,   Chart::Scale::kFromZero};
constexpr Quantity kFlops = {"tflops_per_rank",     "TFLOP/s",     "Compute",
                             "TFLOP/s of one rank", Unit::kNumber, Chart::Scale::kFromZero};
constexpr Quantity kStepMs = {"step_ms", "step time",         "Step time",
                              "",        Unit::kMilliseconds, Chart::Scale::kAutoFromZero};
constexpr Quantity kPeak = {
    "peak_bytes", "peak", "Memory", "peak of the largest rank", Unit::kBytes, Chart::Scale::kFromZero};
constexpr Quantity kActive = {"active_bytes", "active peak", "", "", Unit::kBytes, Chart::Scale::kFromZero};
constexpr Quantity kReserved = {"reserved_bytes", "reserved peak",        "", "",
                                Unit::kBytes,     Chart::Scale::kFromZero};
constexpr Quantity kBusy = {"communication_ms",  "busy",
                            "Communication",     "time per step, rank 0",
                            Unit::kMilliseconds, Chart::Scale::kFromZero};
constexpr Quantity kExposed = {"exposed_ms", "computation waited for it", "",
                               "",           Unit::kMilliseconds,         Chart::Scale::kFromZero};
constexpr Quantity kShare = {"communication_share",       "exposed",    "Exposed communication",
                             "share of the step, rank 0", Unit::kShare, Chart::Scale::kFromZero};
constexpr Quantity kLossScale = {"loss_scale", "loss scale", "Loss scale",
                                 "",           Unit::kCount, Chart::Scale::kAutoFromZero};
constexpr Quantity kStall = {"checkpoint_ms",     "wait",
                             "Checkpoint stalls", "time that training waited for a save",
                             Unit::kMilliseconds, Chart::Scale::kFromZero,
                             Chart::Form::kEvents};

/// An empty chart with the title, unit, scale and form of `quantity`.
Chart chart_of(const Quantity& quantity) {
  return {.title = quantity.title,
          .of = quantity.of,
          .unit = quantity.unit,
          .scale = quantity.scale,
          .form = quantity.form,
          .lines = {}};
}

std::vector<ChartMark> marks_of(const RunRecord& run) {
  std::vector<ChartMark> marks;
  for (size_t i = 0; i < run.attempts.size(); ++i) {
    const auto& from = run.attempts[i].resumed_from;
    if (!from || *from <= 0) continue;
    marks.push_back(
        {static_cast<double>(*from) + 0.5, fmt::format("attempt {} continued after step {}", i + 1, *from)});
  }
  return marks;
}

/// The run's curve of `quantity`; empty if it was not recorded, or says nothing.
const Curve& curve_of(const RunRecord& run, const Quantity& quantity) {
  static const Curve kNone;
  return quantity.key == std::string_view(kTop5.key) && !top5_tells(run) ? kNone
                                                                         : run.metrics.curve(quantity.key);
}

Chart chart_with(const RunRecord& run, const std::vector<Quantity>& quantities, const std::string& note) {
  Chart chart = chart_of(quantities.front());
  for (const Quantity& quantity : quantities) {
    if (const Curve& curve = curve_of(run, quantity); !curve.empty())
      chart.lines.push_back({quantity.name, curve});
  }
  chart.marks = marks_of(run);
  chart.note = note;
  return chart;
}

Markup draw_quantities(const RunRecord& run, const std::vector<Quantity>& quantities,
                       const std::string& note = {}) {
  return draw_chart(chart_with(run, quantities, note));
}

Markup draw_step_times(const RunRecord& run) {
  std::vector<double> settled = settled_values(run, run.metrics.curve("step_ms"));
  if (settled.size() < kLeastSteps) return {};  // the curve shows each of them
  const auto median = quantile(settled, 0.5), p95 = quantile(settled, 0.95);
  if (!median) return {};
  const size_t left_out = run.metrics.curve("step_ms").size() - settled.size();
  return draw_distribution(
      {.title = "Distribution of step times",
       .of = fmt::format("median {}, 95% below {}", format_value(Unit::kMilliseconds, *median),
                         format_value(Unit::kMilliseconds, *p95)),
       .unit = Unit::kMilliseconds,
       .values = std::move(settled),
       .marks = {{*median, "median"}, {*p95, "95% lie below"}},
       .note = fmt::format("Without the warm-up, {} step{}.", left_out, left_out == 1 ? "" : "s")});
}

std::string skipped_note(const RunRecord& run) {
  const std::vector<double>& skipped = run.metrics.skipped;
  if (skipped.empty()) return {};
  constexpr size_t kShown = 12;
  std::vector<std::string> steps;
  for (size_t i = 0; i < std::min(kShown, skipped.size()); ++i)
    steps.push_back(with_commas(static_cast<int64_t>(skipped[i])));
  return fmt::format("{} skipped because gradients overflowed: step{} {}{}.",
                     skipped.size() == 1 ? "One step was" : with_commas(std::ssize(skipped)) + " steps were",
                     skipped.size() == 1 ? "" : "s", join(steps, ", "),
                     skipped.size() > kShown ? ", ..." : "");
}

std::string stall_note(const RunRecord& run) {
  const Curve& stalls = run.metrics.curve("checkpoint_ms");
  const auto median = quantile(stalls.y, 0.5);
  if (!median) return {};
  return fmt::format("{} save{}, median {}.", stalls.size(), stalls.size() == 1 ? "" : "s",
                     format_value(Unit::kMilliseconds, *median));
}

/// Keys that charts above are made for, or that say the same in another way.
bool has_a_chart(const std::string& key) {
  static const std::set<std::string> kKeys = {"loss",
                                              "val_loss",
                                              "val_top1",
                                              "val_top5",
                                              "lr",
                                              "grad_norm",
                                              "tokens_per_s",
                                              "tflops_per_rank",
                                              "step_ms",
                                              "steps_per_s",
                                              "tokens",
                                              "peak_bytes",
                                              "active_bytes",
                                              "reserved_bytes",
                                              "communication_ms",
                                              "exposed_ms",
                                              "communication_share",
                                              "loss_scale",
                                              "checkpoint_ms"};
  return kKeys.contains(key);
}

/// The unit that a key of metrics.jsonl ends with, if it does.
Unit unit_of(const std::string& key) {
  if (key.ends_with("_ms")) return Unit::kMilliseconds;
  if (key.ends_with("_bytes")) return Unit::kBytes;
  if (key.ends_with("_share")) return Unit::kShare;
  if (key.ends_with("_per_s")) return Unit::kCount;
  return Unit::kNumber;
}

/// "ema decay" of "ema_decay".
std::string in_words(const std::string& key) {
  std::string words = key;
  for (const std::string_view unit : {"_ms", "_bytes"}) {
    if (words.ends_with(unit) && words.size() > unit.size()) words.resize(words.size() - unit.size());
  }
  if (words.ends_with("_per_s")) words.replace(words.size() - 6, 6, "/s");
  std::ranges::replace(words, '_', ' ');
  return words;
}

Markup draw_others(const RunRecord& run) {
  Markup charts;
  for (const auto& [key, curve] : run.metrics.curves) {
    if (has_a_chart(key)) continue;
    const std::string words = in_words(key);
    std::string title = words;
    if (!title.empty() && title[0] >= 'a' && title[0] <= 'z')
      title[0] = static_cast<char>(title[0] - 'a' + 'A');
    charts += draw_chart({.title = title,
                          .of = key,
                          .unit = unit_of(key),
                          .scale = Chart::Scale::kAuto,
                          .lines = {{words, curve}},
                          .marks = marks_of(run)});
  }
  return charts;
}

/// A loss is the mean over what the run counts.
std::string loss_unit(const RunRecord& run) {
  if (run.metrics.curve("tokens").empty()) return {};
  return counted_in(run) == "images" ? "nats per image" : "nats per token";
}

const Quantity& throughput_in(const std::string& counted) {
  return counted == "images" ? kImages : kTokens;
}

const Quantity& throughput_of(const std::vector<RunRecord>& runs) {
  return count_the_same(runs) ? throughput_in(counted_in(runs)) : kBoth;
}

Markup draw_over(const std::vector<RunRecord>& runs, const std::vector<std::string>& names,
                 const Quantity& quantity) {
  Chart chart = chart_of(quantity);
  bool any = false;
  for (size_t i = 0; i < runs.size(); ++i) {
    chart.lines.push_back({names[i], curve_of(runs[i], quantity)});  // empty ones keep the colours in step
    any = any || !chart.lines.back().curve.empty();
  }
  return any ? draw_chart(chart) : Markup();
}

/// A curve over the time that steps took, without what lay between attempts.
Curve over_time(const RunRecord& run, const char* key) {
  const Curve &values = run.metrics.curve(key), &times = run.metrics.curve("step_ms");
  Curve result;
  double seconds = 0.0;
  size_t at = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    for (; at < times.size() && times.x[at] <= values.x[i]; ++at)
      seconds += times.y[at] > 0.0 ? 1e-3 * times.y[at] : 0.0;
    if (result.empty() || seconds > result.x.back()) result.add(seconds, values.y[i]);
  }
  return result;
}

Markup draw_loss_over_time(const std::vector<RunRecord>& runs, const std::vector<std::string>& names) {
  const bool validated =
      std::ranges::any_of(runs, [](const RunRecord& run) { return !run.metrics.curve("val_loss").empty(); });
  const Quantity& quantity = validated ? kValLoss : kLoss;
  Chart chart = chart_of(quantity);
  chart.title += " over time";
  chart.of = "sum of step times";
  chart.x_unit = Unit::kSeconds;
  chart.x_name = "time";
  for (size_t i = 0; i < runs.size(); ++i)
    chart.lines.push_back({names[i], over_time(runs[i], quantity.key)});
  return draw_chart(chart);
}

}  // namespace

std::string sharing_note(const std::vector<RunRecord>& runs) {
  size_t most = 0;
  for (const RunRecord& run : runs) most = std::max(most, run.metrics.steps.size());
  if (most <= kMostBins) return {};
  return fmt::format(
      "{} steps are drawn at {} positions: a line is the mean of the steps at a position, its band spans "
      "their smallest and largest values.",
      with_commas(static_cast<int64_t>(most)), kMostBins);
}

Markup draw_run_charts(const RunRecord& run) {
  Quantity loss = kLoss;
  const std::string unit = loss_unit(run);
  loss.of = unit.c_str();
  Markup charts = draw_quantities(run, {loss, kValLoss});
  charts += draw_quantities(run, {kTop1, kTop5});
  charts += draw_quantities(run, {kLr});
  charts +=
      draw_quantities(run, {kGradNorm}, run.metrics.curve("loss_scale").empty() ? skipped_note(run) : "");
  charts += draw_quantities(run, {kStepMs});
  charts += draw_step_times(run);
  charts += draw_quantities(run, {throughput_in(counted_in(run))});
  charts += draw_quantities(run, {kFlops});
  charts += draw_quantities(run, {kPeak, kActive, kReserved});
  charts += draw_quantities(run, {kBusy, kExposed});
  charts += draw_quantities(run, {kShare});
  charts += draw_quantities(run, {kLossScale}, skipped_note(run));
  charts += draw_quantities(run, {kStall}, stall_note(run));
  charts += draw_others(run);
  return charts.empty() ? charts : element("div", {{"class", "charts"}}, charts);
}

std::string draw_training_curves(const RunRecord& run) {
  Quantity loss = kLoss;
  const std::string unit = loss_unit(run);
  loss.of = unit.c_str();
  std::vector<Chart> charts;
  for (const std::vector<Quantity>& quantities : std::vector<std::vector<Quantity>>{
           {loss, kValLoss}, {kTop1, kTop5}, {kLr}, {kGradNorm}, {kStepMs}, {throughput_in(counted_in(run))}})
    charts.push_back(chart_with(run, quantities, ""));
  return charts_as_svg(run.name, charts);
}

Markup draw_compared_charts(const std::vector<RunRecord>& runs, const std::vector<std::string>& names) {
  Markup charts;
  for (const Quantity& quantity : {kLoss, kValLoss}) charts += draw_over(runs, names, quantity);
  charts += draw_loss_over_time(runs, names);
  for (const Quantity& quantity :
       {kTop1, kTop5, throughput_of(runs), kStepMs, kShare, kPeak, kGradNorm, kLr, kLossScale, kStall})
    charts += draw_over(runs, names, quantity);
  return charts.empty() ? charts : element("div", {{"class", "charts"}}, charts);
}

}  // namespace trireme::report
