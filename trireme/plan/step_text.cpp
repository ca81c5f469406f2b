// A step program as text and back.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/lowering.h"
#include "trireme/plan/step_program.h"
#include "trireme/plan/text_file.h"

namespace trireme::plan {
namespace {

/// Names with blanks stand between quotation marks.
std::string quoted(const std::string& name) {
  return name.find(' ') == std::string::npos ? name : fmt::format("\"{}\"", name);
}

std::string unit_text(const StepProgram& program, int64_t unit) {
  return unit == Action::kWholeModel ? "*" : quoted(program.units[static_cast<size_t>(unit)].name);
}

std::string micro_batch_text(int64_t micro_batch) {
  return micro_batch == Action::kOnceAStep ? "-" : fmt::format("m{}", micro_batch);
}

std::string number_text(int64_t number) {
  return number < 0 ? "-" : fmt::format("{}", number);
}

/// Before the collectives of ranks along another axis than those of data: "tp.".
std::string prefix_of(Along along) {
  return along == Along::kData ? std::string() : fmt::format("{}.", name(along));
}

std::string transfers_text(const Action& action) {
  std::vector<std::string> parts;
  for (const Transfer& transfer : action.transfers)
    parts.push_back(fmt::format("{}{}/{}:{}", prefix_of(transfer.along), name(transfer.collective),
                                transfer.ranks, with_commas(transfer.bytes)));
  if (parts.empty()) return "-";
  return join(parts, "+");
}

/// "2B#0": for stage 2, a gradient, in buffer 0.
std::string message_text(const Action& action) {
  if (!action.is_message()) return "-";
  const std::string text = fmt::format("{}{}", action.stage, letter_of(action.message));
  return action.buffer < 0 ? text : fmt::format("{}#{}", text, action.buffer);
}

size_t name_width(const StepProgram& program) {
  size_t width = 4;
  for (const ProgramUnit& unit : program.units) width = std::max(width, quoted(unit.name).size());
  return width;
}

class StepReader {
 public:
  StepProgram read(std::string_view text);

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError("[plan.step_program] line {} '{}': {}", line_number_, line_, what);
  }
  const std::string& word(size_t index) const {
    if (index >= words_.size()) fail(fmt::format("it has only {} words", words_.size()));
    return words_[index];
  }
  int64_t number(std::string text) const;
  template <Choice Enum>
  Enum choice(const std::string& word) const;
  int64_t unit(const std::string& name) const;
  int64_t micro_batch(const std::string& word) const {
    return word == "-" ? Action::kOnceAStep : number(word.substr(word.starts_with('m') ? 1 : 0));
  }
  std::vector<Transfer> transfers(const std::string& word) const;
  void read_message(const std::string& word, Action& action) const;
  void read_unit();
  void read_buffer();
  void read_pass();
  void read_action();
  void place_buffers();
  void place_waits();
  int64_t place_of(int64_t action) const;

  StepProgram program_;
  std::map<int64_t, int64_t> places_;  ///< of actions, by the numbers that the text gives them
  std::vector<std::pair<size_t, std::string>> buffer_lines_, action_lines_;
  std::string line_;
  size_t line_number_ = 0;
  std::vector<std::string> words_;
};

int64_t StepReader::number(std::string text) const {
  std::erase(text, ',');
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    fail(fmt::format("'{}' is not a number of 0 or more", text));
  return value;
}

template <Choice Enum>
Enum StepReader::choice(const std::string& word) const {
  if (const auto value = parse<Enum>(word)) return *value;
  std::vector<std::string> known(kNames<Enum>.begin(), kNames<Enum>.end());
  fail(fmt::format("'{}' is not one of {}", word, join(known, ", ")));
}

int64_t StepReader::unit(const std::string& name) const {
  if (name == "*") return Action::kWholeModel;
  const auto found = std::ranges::find(program_.units, name, &ProgramUnit::name);
  if (found == program_.units.end()) fail(fmt::format("unit '{}' is not declared above", name));
  return found - program_.units.begin();
}

std::vector<Transfer> StepReader::transfers(const std::string& word) const {
  std::vector<Transfer> result;
  if (word == "-") return result;
  for (std::string part : split(word, '+')) {
    Along along = Along::kData;
    for (const Along axis : {Along::kTp, Along::kCp})
      if (part.starts_with(prefix_of(axis))) along = axis;
    part.erase(0, prefix_of(along).size());
    const size_t slash = part.find('/'), colon = part.find(':');
    if (slash == std::string::npos || colon == std::string::npos || colon < slash)
      fail(
          fmt::format("'{}' is not a transfer; write COLLECTIVE/RANKS:BYTES, with tp. or cp. in front where "
                      "ranks along that axis take part",
                      part));
    result.push_back({choice<Collective>(part.substr(0, slash)),
                      number(part.substr(slash + 1, colon - slash - 1)), number(part.substr(colon + 1)),
                      along});
  }
  return result;
}

void StepReader::read_unit() {
  if (word(3) != "trainable" && word(3) != "frozen")
    fail(fmt::format("'{}' is neither trainable nor frozen", word(3)));
  program_.units.push_back({.name = word(1),
                            .numel = number(word(2)),
                            .trainable = word(3) == "trainable",
                            .activation_bytes = number(word(5)),
                            .between_halves_bytes = number(word(7))});
  ProgramUnit& unit = program_.units.back();
  for (size_t at = 8; at < words_.size();) {
    if (word(at) == "uses") {
      unit.uses = number(word(at + 1));
      at += 2;
    } else if (word(at) == "tied") {
      unit.tied = true;
      ++at;
    } else if (word(at) == "frozen") {
      unit.frozen = number(word(at + 1));
      at += 2;
    } else if (word(at) == "nf4" && word(at + 1) == "beside") {
      unit.nf4 = Nf4Unit{.rest = number(word(at + 2))};
      at += 3;
    } else if (word(at) == "fp8" && word(at + 1) == "beside") {
      unit.fp8 = Fp8Unit{.rest = number(word(at + 2))};
      at += 3;
    } else {
      fail(fmt::format("'{}' is none of 'uses', 'tied', 'frozen', 'nf4 beside' and 'fp8 beside'", word(at)));
    }
  }
}

void StepReader::read_buffer() {
  Buffer buffer{.role = choice<Role>(word(1)),
                .unit = unit(word(2)),
                .micro_batch = micro_batch(word(3)),
                .bytes = number(word(4))};
  size_t at = 5;
  if (word(at) == "part_of") {
    buffer.part_of = choice<Role>(word(at + 1));
    at += 2;
  }
  if (word(at) == "from") {
    buffer.from = number(word(at + 1));
    buffer.to = number(word(at + 3));
  } else if (word(at) != "kept") {
    fail("expected 'kept' or 'from A to B'");
  }
  program_.buffers.push_back(buffer);
  buffer_lines_.emplace_back(line_number_, line_);
}

int64_t StepReader::place_of(int64_t action) const {
  const auto found = places_.find(action);
  if (found == places_.end()) fail(fmt::format("there is no action {}", action));
  return found->second;
}

void StepReader::place_buffers() {
  for (size_t index = 0; index < program_.buffers.size(); ++index) {
    Buffer& buffer = program_.buffers[index];
    if (buffer.is_kept()) continue;
    std::tie(line_number_, line_) = buffer_lines_[index];
    buffer.from = place_of(buffer.from);
    buffer.to = place_of(buffer.to);
  }
}

void StepReader::place_waits() {
  for (size_t index = 0; index < program_.actions.size(); ++index) {
    Action& action = program_.actions[index];
    if (action.awaits < 0) continue;
    std::tie(line_number_, line_) = action_lines_[index];
    action.awaits = place_of(action.awaits);
  }
}

void StepReader::read_pass() {
  const auto at = std::ssize(program_.actions);
  if (!program_.passes.empty()) program_.passes.back().end = at;
  program_.passes.push_back({choice<Pass::Kind>(word(1)), micro_batch(word(2)), at, at});
  if (words_.size() > 3 && word(3) == "stage") program_.passes.back().stage = number(word(4));
}

void StepReader::read_message(const std::string& word, Action& action) const {
  const size_t letter = word.find_first_not_of("0123456789");
  for (const Message message : all_values<Message>()) {
    if (letter == std::string::npos || word[letter] != letter_of(message)) continue;
    action.stage = number(word.substr(0, letter));
    action.message = message;
    if (letter + 1 == word.size()) return;
    if (word[letter + 1] != '#') break;
    action.buffer = number(word.substr(letter + 2));
    return;
  }
  fail(fmt::format("'{}' is no message; write STAGE, one of F, B, H, P, T, and #BUFFER", word));
}

void StepReader::read_action() {
  if (program_.passes.empty()) fail("an action comes before the first 'pass'");
  if (!places_.emplace(number(word(0)), std::ssize(program_.actions)).second)
    fail(fmt::format("action {} is used already", word(0)));
  program_.actions.push_back({.kind = choice<ActionKind>(word(2)),
                              .unit = unit(word(3)),
                              .micro_batch = micro_batch(word(4)),
                              .lane = choice<Lane>(word(1)),
                              .transfers = transfers(word(5)),
                              .awaits = word(7) == "-" ? -1 : number(word(7)),
                              .stage = program_.passes.back().stage,
                              .peer = word(6) == "-" ? -1 : number(word(6))});
  Action& action = program_.actions.back();
  if (action.is_message()) read_message(word(8), action);
  action_lines_.emplace_back(line_number_, line_);
}

StepProgram StepReader::read(std::string_view text) {
  for (const std::string& line : split(std::string(text), '\n')) {
    ++line_number_;
    line_ = line;
    words_ = words_of(line);
    if (words_.empty() || words_.front().starts_with('#')) continue;
    if (words_.front() == "unit") {
      read_unit();
    } else if (words_.front() == "buffer") {
      read_buffer();
    } else if (words_.front() == "pass") {
      read_pass();
    } else {
      read_action();
    }
  }
  if (!program_.passes.empty()) program_.passes.back().end = std::ssize(program_.actions);
  place_buffers();
  place_waits();
  return std::move(program_);
}

}  // namespace

std::string to_text(const StepProgram& program) {
  const size_t width = name_width(program);
  std::string text = fmt::format("#{:<5} {:<{}} {:>15}\n", "", "unit", width, "elements");
  for (const ProgramUnit& unit : program.units) {
    text += fmt::format("unit   {:<{}} {:>15} {} activations {} between_halves {}", quoted(unit.name), width,
                        with_commas(unit.numel), unit.trainable ? "trainable" : "frozen   ",
                        with_commas(unit.activation_bytes), with_commas(unit.between_halves_bytes));
    if (unit.uses != 1) text += fmt::format(" uses {}", unit.uses);
    if (unit.tied) text += " tied";
    if (unit.frozen != 0) text += fmt::format(" frozen {}", with_commas(unit.frozen));
    if (unit.nf4) text += fmt::format(" nf4 beside {}", with_commas(unit.nf4->rest));
    if (unit.fp8) text += fmt::format(" fp8 beside {}", with_commas(unit.fp8->rest));
    text += '\n';
  }
  text +=
      fmt::format("#{:<5} {:<11} {:<{}} {:>3} {:>17} memory\n", "", "buffer", "unit", width, "m", "bytes");
  for (const Buffer& buffer : program.buffers) {
    const std::string part = buffer.part_of ? fmt::format("part_of {} ", *buffer.part_of) : "";
    const std::string life = buffer.is_kept() ? "kept" : fmt::format("from {} to {}", buffer.from, buffer.to);
    text +=
        fmt::format("buffer {:<11} {:<{}} {:>3} {:>17} {}{}\n", buffer.role, unit_text(program, buffer.unit),
                    width, micro_batch_text(buffer.micro_batch), with_commas(buffer.bytes), part, life);
  }
  const std::vector<HeldBytes> held = held_bytes(program);
  size_t transfers_width = 9;
  for (const Action& action : program.actions)
    transfers_width = std::max(transfers_width, transfers_text(action).size());
  const bool staged = std::ranges::any_of(program.actions, &Action::is_message);
  text += fmt::format("#{:>4} {:<8} {:<15} {:<{}} {:>3} {:<{}} {:>4} {:>6} {} memory\n", "", "lane", "action",
                      "unit", width, "m", "transfers", transfers_width, "peer", "awaits",
                      staged ? "message" : "");
  for (const Pass& pass : program.passes) {
    text += fmt::format("pass {} {}", pass.kind, micro_batch_text(pass.micro_batch));
    text += staged ? fmt::format(" stage {}\n", pass.stage) : "\n";
    for (int64_t at = pass.begin; at < pass.end; ++at) {
      const Action& action = program.actions[static_cast<size_t>(at)];
      text += fmt::format("{:>5} {:<8} {:<15} {:<{}} {:>3} {:<{}} {:>4} {:>6} {} {}\n", at, action.lane,
                          action.kind, unit_text(program, action.unit), width,
                          micro_batch_text(action.micro_batch), transfers_text(action), transfers_width,
                          number_text(action.peer), number_text(action.awaits),
                          staged ? fmt::format("{:<7}", message_text(action)) : "",
                          with_commas(held[static_cast<size_t>(at)].total()));
    }
  }
  return text;
}

StepProgram step_program_from_text(std::string_view text) {
  return StepReader().read(text);
}

}  // namespace trireme::plan
