#include "trireme/bench/results_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>

#include "trireme/base/text.h"
#include "trireme/report/table.h"

namespace trireme::bench {
namespace {

const std::string kNoValue = "-";

/// The last run of an arm that has records; none: there is none.
const Sample* last_sample(const TargetResult& target, size_t arm) {
  const Sample* last = nullptr;
  for (const Sample& sample : target.samples) {
    if (sample.slot.arm == static_cast<int64_t>(arm) && sample.code == 0 && sample.error.empty())
      last = &sample;
  }
  return last;
}

std::string bytes_or_none(int64_t bytes) {
  return bytes > 0 ? format_bytes(static_cast<double>(bytes)) : kNoValue;
}

/// The share of a step in which computing waited for other ranks.
std::string waiting_text(const Sample& sample, double step_ms) {
  if (sample.exposed_ms < 0.0 || step_ms <= 0.0) return kNoValue;
  return fmt::format("{:.0f}%", 100.0 * std::min(1.0, sample.exposed_ms / step_ms));
}

/// "train:fsdp (documents)".
std::string title_of(const TargetResult& target) {
  return target.mode == "declared" ? target.name : fmt::format("{} ({})", target.name, target.mode);
}

std::vector<std::string> phase_cells(const TargetResult& target, size_t arm, const Score& score) {
  const Sample* sample = last_sample(target, arm);
  if (sample == nullptr) return {kNoValue, kNoValue, kNoValue, kNoValue};
  return {bytes_or_none(sample->peak_bytes), bytes_or_none(sample->state_bytes),
          bytes_or_none(sample->sent_bytes), waiting_text(*sample, score.median_ms)};
}

std::vector<std::string> arm_cells(const Results& results, const TargetResult& target, size_t arm,
                                   const Score& score) {
  std::vector<std::string> cells = {
      title_of(target),
      target.arms[arm].name,
      std::to_string(ranks_of(target.arms[arm], target.ranks)),
      score.values.empty() ? kNoValue : fmt::format("{:.2f}", score.median_ms),
      score.ratios.empty() ? kNoValue : fmt::format("{:.3f}", score.ratio),
      score.ratios.empty() ? kNoValue : fmt::format("{:.3f}", score.interval.low),
      score.ratios.empty() ? kNoValue : fmt::format("{:.3f}", score.interval.high),
      verdict_text(score)};
  if (results.profile == "none") return cells;
  for (std::string& cell : phase_cells(target, arm, score)) cells.push_back(std::move(cell));
  return cells;
}

/// "12.3 G", in thousands.
std::string short_count(double value) {
  constexpr std::string_view kPrefixes[] = {"", "k", "M", "G", "T", "P"};
  size_t prefix = 0;
  while (value >= 1e3 && prefix + 1 < std::size(kPrefixes)) {
    value /= 1e3;
    ++prefix;
  }
  return fmt::format("{:.3g} {}", value, kPrefixes[prefix]);
}

std::string counted_text(double value, const char* unit) {
  return value > 0.0 ? short_count(value) + unit : "not counted";
}

std::vector<std::string> roofline_cells(const GroupRates& rates) {
  return {counted_text(rates.flops, "FLOP"),
          counted_text(rates.bytes, "B"),
          rates.intensity > 0.0 ? fmt::format("{:.3g}", rates.intensity) : kNoValue,
          rates.flops > 0.0 ? short_count(rates.flops_per_s) + "FLOP/s" : kNoValue,
          rates.bytes > 0.0 ? short_count(rates.bytes_per_s) + "B/s" : kNoValue,
          rates.share > 0.0 ? fmt::format("{:.0f}%", 100.0 * rates.share) : kNoValue,
          rates.bound.empty() ? kNoValue : rates.bound};
}

std::vector<std::string> group_cells(const Results& results, const TargetResult& target,
                                     const ArmProfile& profile, const GroupRates& rates) {
  std::vector<std::string> cells = {title_of(target), target.arms[static_cast<size_t>(profile.arm)].name,
                                    rates.group.name, fmt::format("{:.3f}", rates.group.ms),
                                    std::to_string(rates.group.calls)};
  if (depth_of(results.profile) != Depth::kRoofline) return cells;
  for (std::string& cell : roofline_cells(rates)) cells.push_back(std::move(cell));
  return cells;
}

/// Rows as a table for a terminal.
std::string table_text(const Rows& rows, int64_t columns) {
  if (rows.cells.empty()) return "";
  std::vector<report::Column> titles;
  for (const std::string& title : rows.titles) {
    const bool words =
        title == "target" || title == "arm" || title == "verdict" || title == "kind" || title == "bound by";
    titles.push_back({title, words ? report::Align::kLeft : report::Align::kRight});
  }
  report::Table table(std::move(titles));
  for (const std::vector<std::string>& cells : rows.cells) table.add_row(cells);
  return table.to_string(columns);
}

/// Targets whose arms have numbers.
bool has_rows(const TargetResult& target) {
  return !target.samples.empty();
}

/// A line with the bytes that ranks hold in the reference and in the last arm.
std::string memory_line(const TargetResult& target) {
  const Sample* first = last_sample(target, 0);
  const Sample* last = last_sample(target, target.arms.size() - 1);
  if (first == nullptr || last == nullptr || first->state_bytes <= 0) return "";
  const double saved =
      100.0 * (1.0 - static_cast<double>(last->state_bytes) / static_cast<double>(first->state_bytes));
  return fmt::format(
      "{} summary: {} holds {} of model state a rank, {} holds {}, {:.1f}% less; peaks {} and {}\n",
      target.name, target.arms.front().name, bytes_or_none(first->state_bytes), target.arms.back().name,
      bytes_or_none(last->state_bytes), saved, bytes_or_none(first->peak_bytes),
      bytes_or_none(last->peak_bytes));
}

/// Why a target has no ratios.
std::string reason_line(const TargetResult& target) {
  if (target.state == State::kMeasured) return "";
  return fmt::format("{} is {}{}\n", title_of(target), state_text(target.state),
                     target.reason.empty() ? "" : ": " + target.reason);
}

/// A line of a Markdown table; bars inside cells would end them.
std::string markdown_row(const std::vector<std::string>& cells) {
  std::string line = "|";
  for (const std::string& cell : cells) {
    std::string text;
    for (const char letter : cell) text += letter == '|' ? std::string("\\|") : std::string(1, letter);
    line += " " + text + " |";
  }
  return line + "\n";
}

std::string markdown_table(const Rows& rows) {
  if (rows.cells.empty()) return "";
  std::string text =
      markdown_row(rows.titles) + markdown_row(std::vector<std::string>(rows.titles.size(), "---"));
  for (const std::vector<std::string>& cells : rows.cells) text += markdown_row(cells);
  return text;
}

std::string threads_text(const TargetResult& target) {
  return target.threads > 0 ? fmt::format(" Threads a rank: {}.", target.threads) : "";
}

std::string markdown_target(const TargetResult& target) {
  std::string text = fmt::format("\n### {}\n\n{}. Different: {}. Expected: {}.{}\n", title_of(target),
                                 target.summary, target.difference, target.expected, threads_text(target));
  if (target.state != State::kMeasured) text += "\n**" + reason_line(target);
  if (target.state != State::kMeasured) text.insert(text.size() - 1, "**");
  if (!target.checks.empty()) text += "\n";
  for (const Check& check : target.checks)
    text +=
        fmt::format("- {}: {} ({})\n", check.holds ? "holds" : "**does not hold**", check.what, check.detail);
  if (!target.profiles.empty()) text += "\n";
  for (const std::string& line : profile_lines(target)) text += "- " + line + "\n";
  return text;
}

std::string csv_word(const std::string& word) {
  if (word.find_first_of(",\"\n") == std::string::npos) return word;
  std::string quoted = "\"";
  for (const char letter : word) quoted += letter == '"' ? std::string("\"\"") : std::string(1, letter);
  return quoted + "\"";
}

}  // namespace

Rows rows_of(const Results& results) {
  Rows rows{.titles = {"target", "arm", "ranks", "ms/step", "ratio", "from", "to", "verdict"}, .cells = {}};
  if (results.profile != "none") {
    for (const char* title : {"peak", "state", "sent/step", "waiting"}) rows.titles.emplace_back(title);
  }
  for (const TargetResult& target : results.targets) {
    if (!has_rows(target)) continue;
    const std::vector<Score> scores = score(target);
    for (size_t arm = 0; arm < scores.size(); ++arm)
      rows.cells.push_back(arm_cells(results, target, arm, scores[arm]));
  }
  return rows;
}

Rows profile_rows_of(const Results& results) {
  Rows rows{.titles = {"target", "arm", "kind", "ms/step", "calls/step"}, .cells = {}};
  if (depth_of(results.profile) == Depth::kRoofline) {
    for (const char* title :
         {"FLOPs/step", "bytes/step", "FLOP/byte", "FLOPs/s", "bytes/s", "of roof", "bound by"})
      rows.titles.emplace_back(title);
  }
  for (const TargetResult& target : results.targets) {
    for (const ArmProfile& profile : target.profiles) {
      for (const GroupRates& rates : rates_of(profile))
        rows.cells.push_back(group_cells(results, target, profile, rates));
    }
  }
  return rows;
}

std::vector<std::string> profile_lines(const TargetResult& target) {
  std::vector<std::string> lines;
  for (const ArmProfile& profile : target.profiles) {
    std::string line =
        fmt::format("{}, {}: ", title_of(target), target.arms[static_cast<size_t>(profile.arm)].name);
    if (!profile.error.empty()) {
      lines.push_back(line + "no profile: " + profile.error);
      continue;
    }
    const KernelProfile& kernels = profile.kernels;
    line += fmt::format("{} of rank 0 in {} steps of {:.2f} ms, {:.2f} ms without any; trace {}",
                        kernels.of_gpu ? "GPU kernels" : "CPU operators", kernels.steps, kernels.step_ms,
                        kernels.idle_ms, profile.trace);
    if (!profile.why_not_counted.empty()) line += "; work is not counted: " + profile.why_not_counted;
    if (profile.roof)
      line += fmt::format("; roof of a rank by {}: {}FLOP/s, {}B/s, in caches {}", profile.roof->origin,
                          short_count(profile.roof->flops_per_s), short_count(profile.roof->bytes_per_s),
                          profile.roof->cached_bytes_per_s > 0.0
                              ? short_count(profile.roof->cached_bytes_per_s) + "B/s"
                              : "not measured");
    if (!profile.why_no_roof.empty()) line += "; no roof: " + profile.why_no_roof;
    lines.push_back(line);
  }
  return lines;
}

std::string to_text(const Results& results, int64_t columns) {
  std::string text = table_text(rows_of(results), columns);
  const std::string profiles = table_text(profile_rows_of(results), columns);
  if (!profiles.empty()) text += "\n" + profiles;
  for (const TargetResult& target : results.targets) {
    for (const std::string& line : profile_lines(target)) text += line + "\n";
    text += reason_line(target);
    if (target.shows_memory && has_rows(target)) text += memory_line(target);
  }
  return text;
}

std::string method_text(const Results& results) {
  int64_t blocks = 0, warm_up = 0, steps = 0;
  for (const TargetResult& target : results.targets) {
    if (target.samples.empty()) continue;
    blocks = target.blocks;
    warm_up = target.warm_up;
    steps = target.steps;
  }
  const auto ratios = static_cast<size_t>(2 * blocks);
  return fmt::format(
      "Each run has ranks of its own and {} steps, of which the first {} are not counted. Arms alternate, A "
      "B B A, "
      "in {} block{}, so that a ratio is of two runs that stood beside each other, and an arm has {} ratios. "
      "A ratio "
      "above 1 says that the arm takes less time than the reference. The interval is from the smallest to "
      "the "
      "largest ratio; {} such ratios have the true one between them in {:.1f}% of cases.",
      steps, warm_up, blocks, blocks == 1 ? "" : "s", ratios, ratios, 100.0 * coverage(ratios));
}

std::string ratio_text(const Score& score) {
  if (score.ratios.empty()) return kNoValue;
  return fmt::format("{:.3f} ({:.3f} to {:.3f})", score.ratio, score.interval.low, score.interval.high);
}

std::vector<std::pair<std::string, std::string>> facts_of(const Results& results) {
  const Machine& machine = results.machine;
  return {
      {"command", results.command},
      {"started", results.started},
      {"hardware", machine.hardware()},
      {"host", fmt::format("{}, {}, {}, load {:.2f}", machine.hostname, machine.kernel,
                           format_bytes(static_cast<double>(machine.memory_bytes)), machine.load)},
      {"version", fmt::format("{}, commit {}, worker {}", results.version,
                              results.commit.empty() ? "unknown" : results.commit, results.worker_digest)},
      {"environment", results.environment.empty() ? "as it was" : join(results.environment, " ")}};
}

std::string to_markdown(const Results& results) {
  const Rows rows = rows_of(results);
  std::string text = "# Benchmark\n\n";
  if (!results.complete)
    text += "**It was interrupted: targets that are partial or missing have not ended.**\n\n";
  text += method_text(results) + "\n\n";
  text += markdown_table(rows);
  if (const Rows profiles = profile_rows_of(results); !profiles.cells.empty())
    text += "\n## Kernels\n\n" + markdown_table(profiles);
  text += "\n## Targets\n";
  for (const TargetResult& target : results.targets) text += markdown_target(target);
  text += "\n## Where and how\n\n";
  for (const auto& [name, value] : facts_of(results)) text += fmt::format("- {}: `{}`\n", name, value);
  return text;
}

std::string to_csv(const Results& results) {
  std::string text = "target,mode,arm,block,half,step,counted,step_ms,loss,directory\n";
  for (const TargetResult& target : results.targets) {
    for (const Sample& sample : target.samples) {
      const std::string head = fmt::format("{},{},{},{},{}", csv_word(target.name), target.mode,
                                           csv_word(target.arms[static_cast<size_t>(sample.slot.arm)].name),
                                           sample.slot.block + 1, sample.slot.half + 1);
      for (size_t step = 0; step < sample.step_ms.size(); ++step) {
        const bool counted = static_cast<int64_t>(step) >= target.warm_up;
        const std::string loss = step < sample.losses.size() ? fmt::format("{}", sample.losses[step]) : "";
        text += fmt::format("{},{},{},{},{},{}\n", head, step + 1, counted ? 1 : 0, sample.step_ms[step],
                            loss, csv_word(sample.directory));
      }
    }
  }
  return text;
}

}  // namespace trireme::bench
