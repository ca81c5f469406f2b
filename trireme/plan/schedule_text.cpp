// Schedules as text: passes by their letters, and files of a line a rank.
#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/plan/schedule.h"

namespace trireme::plan {
namespace {

constexpr std::string_view kLetters = "FBIW";  // of kPassKinds

constexpr int64_t kMostNumber = 1'000'000'000;

/// Takes a number off the front; none when there is none, or one that numbers nothing.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number > kMostNumber || text.starts_with('-'))
    return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

std::optional<StagePass> parse_pass(std::string_view text) {
  const auto stage = take_number(text);
  if (!stage || text.empty()) return std::nullopt;
  const size_t letter = kLetters.find(text.front());
  text.remove_prefix(1);
  const auto micro_batch = take_number(text);
  if (letter == std::string_view::npos || !micro_batch || !text.empty()) return std::nullopt;
  return StagePass{kPassKinds[letter], *stage, *micro_batch};
}

std::string_view without_blanks(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
  return first == std::string_view::npos ? std::string_view() : text.substr(first, last - first + 1);
}

std::vector<StagePass> parse_line(std::string_view line, size_t number) {
  std::vector<StagePass> passes;
  bool joined = false;  // a plus sign stands before the cell
  for (size_t begin = 0; begin <= line.size();) {
    const size_t end = std::min(line.find_first_of(",+", begin), line.size());
    const std::string_view cell = without_blanks(line.substr(begin, end - begin));
    const bool joins = end < line.size() && line[end] == '+';
    begin = end + 1;
    if (cell.empty() && (joins || joined)) {
      throw ConfigError(
          "[plan.schedule] line {}: '+' has no pass {} it; write a forward and a backward pass that overlap, "
          "such as 0F3+0B1, or remove it",
          number, joined ? "after" : "before");
    }
    joined = joins;
    if (cell.empty()) continue;
    const auto pass = parse_pass(cell);
    if (!pass) {
      throw ConfigError(
          "[plan.schedule] line {}: '{}' is not a pass; write the stage, one of F, B, I, W, and the "
          "micro-batch, such as 2F3",
          number, cell.substr(0, 40));
    }
    passes.push_back(*pass);
    passes.back().with_next = joins;
  }
  return passes;
}

}  // namespace

std::string to_text(const StagePass& pass) {
  return fmt::format("{}{}{}", pass.stage, kLetters.at(pass_index(pass.kind)), pass.micro_batch);
}

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const auto& passes : schedule.ranks) {
    for (size_t i = 0; i < passes.size(); ++i) {
      if (i > 0) text += passes[i - 1].with_next ? '+' : ',';
      text += to_text(passes[i]);
    }
    text += '\n';
  }
  return text;
}

Schedule from_csv(std::string_view text, Placement placement, std::string name) {
  Schedule schedule;
  schedule.name = std::move(name);
  schedule.placement = placement;
  schedule.stages = schedule.micro_batches = 0;
  size_t number = 0;
  int64_t passes = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = without_blanks(text.substr(0, end));
    text.remove_prefix(std::min(text.size(), end + 1));
    ++number;
    if (line.empty()) continue;
    schedule.ranks.push_back(parse_line(line, number));
    passes += std::ssize(schedule.ranks.back());
    for (const StagePass& pass : schedule.ranks.back()) {
      schedule.stages = std::max(schedule.stages, pass.stage + 1);
      schedule.micro_batches = std::max(schedule.micro_batches, pass.micro_batch + 1);
    }
  }
  if (schedule.stages == 0) throw ConfigError("[plan.schedule] {} has no passes", schedule.name);
  if (schedule.stages * schedule.micro_batches > passes) {
    throw ConfigError(
        "[plan.schedule] {} has passes of stage {} and of micro-batch {}, but only {} passes; number stages "
        "and micro-batches from 0, and pass every micro-batch through every stage",
        schedule.name, schedule.stages - 1, schedule.micro_batches - 1, passes);
  }
  return schedule;
}

}  // namespace trireme::plan
