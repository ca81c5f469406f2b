#include "trireme/bench/results_page.h"

#include <fmt/format.h>

#include <algorithm>

#include "trireme/base/text.h"
#include "trireme/bench/results_text.h"
#include "trireme/report/page_parts.h"

namespace trireme::bench {
namespace {

using report::element;
using report::Markup;

/// Places of the picture of ratios, in points.
constexpr double kNames = 300.0, kPlot = 360.0, kRowHeight = 24.0, kTop = 22.0,
                 kWidth = kNames + kPlot + 70.0;

/// A row of the picture.
struct Bar {
  std::string name;
  double ratio = 1.0, low = 1.0, high = 1.0;
  std::string verdict;
};

/// "zero1" of "train:zero1".
std::string without_prefix(const std::string& name) {
  return name.substr(name.find(':') + 1);
}

std::vector<Bar> bars_of(const TargetResult& target) {
  std::vector<Bar> bars;
  const std::vector<Score> scores = score(target);
  for (size_t arm = 0; arm < scores.size(); ++arm) {
    const Score& one = scores[arm];
    if (one.ratios.empty()) continue;
    bars.push_back({.name = fmt::format("{}: {}", without_prefix(target.name), target.arms[arm].name),
                    .ratio = one.ratio,
                    .low = one.interval.low,
                    .high = one.interval.high,
                    .verdict = verdict_text(one)});
  }
  return bars;
}

std::string number(double value) {
  return fmt::format("{:.1f}", value);
}

Markup line(const char* style, double x1, double y1, double x2, double y2) {
  return element(
      "line",
      {{"class", style}, {"x1", number(x1)}, {"y1", number(y1)}, {"x2", number(x2)}, {"y2", number(y2)}});
}

Markup words(double x, double y, const std::string& anchor, const std::string& text) {
  return element("text", {{"x", number(x)}, {"y", number(y)}, {"text-anchor", anchor}}, text);
}

/// A bar from 0 to the ratio, and a line with ends over its interval.
Markup draw_bar(const Bar& bar, double y, double scale) {
  const auto at = [&](double ratio) { return kNames + ratio * scale; };
  const double middle = y + 0.5 * kRowHeight;
  const std::string tip = fmt::format("{}: {:.3f}, from {:.3f} to {:.3f}: {}", bar.name, bar.ratio, bar.low,
                                      bar.high, bar.verdict);
  constexpr double kEnd = 4.0;
  return element("g", element("title", tip) +
                          element("rect", {{"class", "bar"},
                                           {"x", number(kNames)},
                                           {"y", number(y + 5.0)},
                                           {"width", number(bar.ratio * scale)},
                                           {"height", number(kRowHeight - 10.0)}}) +
                          line("axis", at(bar.low), middle, at(bar.high), middle) +
                          line("axis", at(bar.low), middle - kEnd, at(bar.low), middle + kEnd) +
                          line("axis", at(bar.high), middle - kEnd, at(bar.high), middle + kEnd) +
                          words(kNames - 8.0, middle + 4.0, "end", bar.name) +
                          words(at(bar.high) + 8.0, middle + 4.0, "start", fmt::format("{:.3f}", bar.ratio)));
}

Markup draw_bars(const std::vector<Bar>& bars) {
  if (bars.empty()) return {};
  const double most = std::ranges::max(bars, {}, &Bar::high).high;
  const double scale = kPlot / std::max(1.25, 1.05 * most);
  const double height = kTop + kRowHeight * static_cast<double>(bars.size()) + 6.0;
  const double one = kNames + scale;
  Markup picture =
      line("mark", one, kTop - 4.0, one, height) + words(one, kTop - 8.0, "middle", "as the reference");
  for (size_t i = 0; i < bars.size(); ++i)
    picture += draw_bar(bars[i], kTop + kRowHeight * static_cast<double>(i), scale);
  const Markup svg = element(
      "svg",
      {{"viewBox", fmt::format("0 0 {:.0f} {:.0f}", kWidth, height)}, {"role", "img"}, {"class", "c0"}},
      picture);
  return element(
      "figure", {{"class", "chart"}},
      element("figcaption", "Time of the reference over time of the arm, with the interval of all ratios") +
          svg);
}

Markup draw_rows(const Rows& rows) {
  report::PageTable table{.titles = {}, .rows = {}, .style = "numbers"};
  for (const std::string& title : rows.titles) table.titles.emplace_back(title);
  for (const std::vector<std::string>& cells : rows.cells) {
    table.rows.emplace_back();
    for (const std::string& cell : cells) table.rows.back().emplace_back(cell);
  }
  return rows.cells.empty() ? Markup() : report::draw_table(table);
}

Markup draw_checks(const TargetResult& target) {
  if (target.checks.empty()) return {};
  report::PageTable table{.titles = {"check", "", "what was seen"}, .rows = {}, .style = {}};
  for (const Check& check : target.checks)
    table.rows.push_back(
        {check.what,
         element("span", {{"class", check.holds ? "good" : "poor"}}, check.holds ? "holds" : "fails"),
         check.detail});
  return report::draw_table(table);
}

Markup draw_arms(const TargetResult& target) {
  report::PageTable table{.titles = {"arm", "owes", "keys of its own"}, .rows = {}, .style = {}};
  for (const Arm& arm : target.arms)
    table.rows.push_back({arm.name, owed_text(arm), element("code", join(arm.keys, " "))});
  return target.arms.empty() ? Markup() : report::draw_table(table);
}

/// Runs one by one: where they are and what they took.
Markup draw_samples(const TargetResult& target) {
  report::PageTable table{
      .titles = {"block", "arm", "ms/step", "weights", "run"}, .rows = {}, .style = "numbers"};
  for (const Sample& sample : target.samples)
    table.rows.push_back({fmt::format("{}.{}", sample.slot.block + 1, sample.slot.half + 1),
                          target.arms[static_cast<size_t>(sample.slot.arm)].name,
                          fmt::format("{:.3f}", value_of(sample, target.statistic, target.warm_up)),
                          element("code", sample.weights_digest), element("code", sample.directory)});
  return target.samples.empty()
             ? Markup()
             : report::folded("Runs, in the order in which they were made", report::draw_table(table));
}

Markup draw_profiles(const TargetResult& target) {
  Markup lines;
  for (const std::string& line : profile_lines(target)) lines += element("p", {{"class", "note"}}, line);
  return lines;
}

Markup draw_target(const TargetResult& target) {
  Markup body = element("p", fmt::format("{}. Different: {}. Expected: {}.", target.summary,
                                         target.difference, target.expected));
  if (target.state != State::kMeasured)
    body += element(
        "p", {{"class", "cause"}},
        fmt::format("{}{}", state_text(target.state), target.reason.empty() ? "" : ": " + target.reason));
  return report::section(
      fmt::format("{} ({})", target.name, target.mode),
      body + draw_arms(target) + draw_checks(target) + draw_profiles(target) + draw_samples(target));
}

}  // namespace

std::string to_page(const Results& results) {
  std::vector<Bar> bars;
  for (const TargetResult& target : results.targets) {
    for (Bar& bar : bars_of(target)) bars.push_back(std::move(bar));
  }
  Markup body = element("h1", "Benchmark");
  if (!results.complete)
    body += element("p", {{"class", "warn"}},
                    "It was interrupted: targets that are partial or missing have not ended.");
  body += element("p", {{"class", "note"}}, method_text(results));
  body += draw_rows(rows_of(results)) + draw_bars(bars);
  if (const Rows profiles = profile_rows_of(results); !profiles.cells.empty())
    body += report::section("Kernels", draw_rows(profiles));
  for (const TargetResult& target : results.targets) body += draw_target(target);
  body += report::section("Where and how", report::draw_facts(facts_of(results)));
  return report::whole_page("Benchmark", body);
}

}  // namespace trireme::bench
