// Programs as text, both ways.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/instruction_check.h"
#include "trireme/plan/signals_yaml.h"
#include "trireme/plan/text_file.h"

namespace trireme::plan {
namespace {

constexpr std::string_view kFormat = "trireme.program/1";
constexpr std::string_view kDtypeWord = "dtype", kPlaceWord = "place", kNoGradWord = "no_grad",
                           kSignalWord = "signal", kWorkersWord = "workers=", kDatasetWord = "dataset";
/// By kind; an operation has its own name.
constexpr auto kKindWords = std::to_array<std::string_view>(
    {"", "input", "cross", "free", "track", "backward", "gradient", "fetch", "weights", "batch"});

bool is_dtype(std::string_view attribute, int64_t value) {
  return attribute == kDtypeWord && 0 <= value && value < std::ssize(kNames<TensorDtype>);
}

/// " dim=1 by=0.5 shape=4,64": those that are not 0; a dtype always.
std::string attributes_text(const Instruction& instruction) {
  const OpRecord& record = attribute_names(instruction);
  const OpAttributes& attributes = instruction.attributes;
  std::string text;
  for (size_t i = 0; i < record.whole.size(); ++i) {
    const int64_t value = attributes.whole[i];
    if (is_dtype(record.whole[i], value))
      text += fmt::format(" {}={}", record.whole[i], static_cast<TensorDtype>(value));
    else if (!record.whole[i].empty() && value != 0)
      text += fmt::format(" {}={}", record.whole[i], value);
  }
  for (size_t i = 0; i < record.real.size(); ++i) {
    const double value = attributes.real[i];
    if (!record.real[i].empty() && (value != 0 || std::signbit(value)))
      text += fmt::format(" {}={}", record.real[i], value);
  }
  if (attributes.listed > 0) text += fmt::format(" {}={}", record.list, fmt::join(attributes.items(), ","));
  return text;
}

/// Reads one line.
class LineReader {
 public:
  LineReader(std::vector<std::string> words, std::string at, Program& program)
      : words_(std::move(words)), at_(std::move(at)), program_(program) {}

  Instruction read() {
    read_results();
    read_word();
    while (next_ < words_.size()) read_rest(words_[next_++]);
    return instruction_;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError("[plan.program] {}: {}", at_, what);
  }

  static bool is_tensor(std::string_view word) {
    return word.size() > 1 && word[0] == 't' &&
           word.find_first_not_of("0123456789", 1) == std::string_view::npos;
  }

  uint32_t tensor(std::string_view word) const {
    const auto number = is_tensor(word) ? parse_whole_text<uint32_t>(word.substr(1)) : std::nullopt;
    if (!number) fail(fmt::format("'{}' is no tensor; tensors are t0, t1, ...", word));
    return *number;
  }

  void read_results() {
    const auto equals = std::ranges::find(words_, "=");
    if (equals == words_.end()) return;
    for (; words_[next_] != "="; ++next_) {
      if (instruction_.outputs == kMostOpResults) fail(fmt::format("more than {} results", kMostOpResults));
      instruction_.output[instruction_.outputs++] = tensor(words_[next_]);
    }
    if (instruction_.outputs == 0) fail("there is no result before '='");
    ++next_;
  }

  void read_word() {
    if (next_ == words_.size()) fail("there is no operation; write 't1 = relu t0'");
    const std::string& word = words_[next_++];
    const auto kind = std::ranges::find(kKindWords, word);
    const std::optional<Op> op = parse<Op>(word);
    if (kind != kKindWords.end() && !word.empty()) {
      instruction_.kind = static_cast<InstructionKind>(kind - kKindWords.begin());
    } else if (op) {
      instruction_.op = *op;
    } else {
      fail_unknown_word(word);
    }
  }

  [[noreturn]] void fail_unknown_word(const std::string& word) const {
    std::vector<std::string> names(kKindWords.begin() + 1, kKindWords.end());
    for (const std::string_view one : kNames<Op>) names.emplace_back(one);
    const std::string near = nearest_name(word, names);
    fail(fmt::format(
        "unknown operation '{}'{}", word,
        near.empty() ? "; see the list in plan/ops.h" : fmt::format(", did you mean '{}'?", near)));
  }

  void read_rest(const std::string& word) {
    if (word.starts_with('@')) return read_signal(word.substr(1));
    if (word.starts_with('#')) return read_line(word.substr(1));
    if (word == kNoGradWord) return read_no_grad();
    const size_t equals = word.find('=');
    if (equals != std::string::npos) return read_attribute(word.substr(0, equals), word.substr(equals + 1));
    if (instruction_.inputs == kMostOpInputs) fail(fmt::format("more than {} operands", kMostOpInputs));
    instruction_.input[instruction_.inputs++] = tensor(word);
  }

  void read_signal(const std::string& signal) {
    if (!is_signal_name(signal)) fail(fmt::format("'@{}' is no name of a signal", signal));
    if (instruction_.signal != Instruction::kNoSignal) fail("there are two signals; remove one");
    const auto found = std::ranges::find(program_.signals, signal);
    instruction_.signal = static_cast<int32_t>(found - program_.signals.begin());
    if (found == program_.signals.end()) program_.signals.push_back(signal);
  }

  void read_line(const std::string& number) {
    const std::optional<uint32_t> line = parse_whole_text<uint32_t>(number);
    if (!line || *line == 0) fail(fmt::format("'#{}' is no line; lines are #1, #2, ...", number));
    instruction_.line = *line;
  }

  void read_attribute(const std::string& key, const std::string& value) {
    if (std::ranges::find(given_, key) != given_.end())
      fail(fmt::format("{} is given twice; remove one", key));
    given_.push_back(key);
    if (key == kPlaceWord && makes_placed(instruction_.kind)) return read_place(value);
    const OpRecord& record = attribute_names(instruction_);
    const auto whole = std::ranges::find(record.whole, key);
    const auto real = std::ranges::find(record.real, key);
    if (!key.empty() && whole != record.whole.end()) {
      instruction_.attributes.whole[static_cast<size_t>(whole - record.whole.begin())] =
          whole_number(key, value);
    } else if (!key.empty() && real != record.real.end()) {
      const std::optional<double> number = parse_whole_text<double>(value);
      if (!number || !std::isfinite(*number)) fail(fmt::format("{}={} is no number", key, value));
      instruction_.attributes.real[static_cast<size_t>(real - record.real.begin())] = *number;
    } else if (!key.empty() && record.list == key) {
      read_list(key, value);
    } else {
      fail_unknown_attribute(record, key);
    }
  }

  void read_place(const std::string& value) {
    instruction_.place = parse_placement(value);
    if (!instruction_.place) fail(fmt::format("place={} is no placement; write R, P or S(0)", value));
  }

  void read_no_grad() {
    if (instruction_.kind != InstructionKind::kOp || instruction_.no_grad)
      fail(fmt::format("'{}' takes no 'no_grad' here; it stands once, behind an operation",
                       instruction_word(instruction_)));
    instruction_.no_grad = true;
  }

  int64_t whole_number(const std::string& key, const std::string& value) const {
    if (key == kDtypeWord) {
      const std::optional<TensorDtype> dtype = parse<TensorDtype>(value);
      if (!dtype)
        fail(fmt::format("{}={} is no dtype; use {}", key, value, fmt::join(kNames<TensorDtype>, ", ")));
      return static_cast<int64_t>(*dtype);
    }
    const std::optional<int64_t> number = parse_whole_text<int64_t>(value);
    if (!number) fail(fmt::format("{}={} is no whole number", key, value));
    return *number;
  }

  void read_list(const std::string& key, const std::string& value) {
    std::vector<int64_t> items;
    for (const std::string& item : split(value, ',')) {
      const std::optional<int64_t> number = parse_whole_text<int64_t>(item);
      if (!number) fail(fmt::format("{}={} is no list of whole numbers; write {}=4,64", key, value, key));
      items.push_back(*number);
    }
    if (items.size() > OpAttributes::kMostListed)
      fail(fmt::format("{} has {} numbers; there may be {}", key, items.size(), OpAttributes::kMostListed));
    instruction_.attributes.set_items(items);
  }

  [[noreturn]] void fail_unknown_attribute(const OpRecord& record, const std::string& key) const {
    std::vector<std::string> names;
    const auto add = [&names](std::string_view one) {
      if (!one.empty()) names.emplace_back(one);
    };
    std::ranges::for_each(record.whole, add);
    std::ranges::for_each(record.real, add);
    add(record.list);
    fail(fmt::format("'{}' has no attribute '{}'{}", instruction_word(instruction_), key,
                     names.empty() ? "" : fmt::format("; it has {}", join(names, ", "))));
  }

  std::vector<std::string> words_;
  std::string at_;
  Program& program_;
  Instruction instruction_;
  std::vector<std::string> given_;
  size_t next_ = 0;
};

/// "signal NAME workers=0,1", before whatever names the signal: a client's file has it where that is used
/// first.
void read_signal_line(const std::vector<std::string>& words, const std::string& at, Program& program) {
  const auto fail = [&at](const std::string& what) { throw ConfigError("[plan.program] {}: {}", at, what); };
  if (words.size() != 3 || !words[2].starts_with(kWorkersWord) || !is_signal_name(words[1]))
    fail("a signal is written 'signal NAME workers=0,1'");
  if (program.signals.size() > program.workers.size())
    fail("signals stand before the first instruction that names one");
  if (std::ranges::find(program.signals, words[1]) != program.signals.end())
    fail(fmt::format("'{}' is named twice; remove one", words[1]));
  std::vector<int64_t> workers;
  for (const std::string& item : split(words[2].substr(kWorkersWord.size()), ',')) {
    const std::optional<int64_t> worker = parse_whole_text<int64_t>(item);
    if (!worker) fail(fmt::format("'{}' is no worker; workers are numbered from 0 on", item));
    workers.push_back(*worker);
  }
  program.signals.push_back(words[1]);
  program.workers.push_back(std::move(workers));
}

}  // namespace

std::string_view instruction_word(const Instruction& instruction) {
  if (instruction.kind == InstructionKind::kOp) return name(instruction.op);
  return kKindWords.at(static_cast<size_t>(instruction.kind));
}

std::string to_text(const Instruction& instruction, const std::vector<std::string>& signals) {
  std::string text;
  for (size_t i = 0; i < instruction.outputs; ++i) text += fmt::format("t{} ", instruction.output[i]);
  if (instruction.outputs > 0) text += "= ";
  text += instruction_word(instruction);
  for (size_t i = 0; i < instruction.inputs; ++i) text += fmt::format(" t{}", instruction.input[i]);
  text += attributes_text(instruction);
  if (instruction.place) text += fmt::format(" {}={}", kPlaceWord, to_text(*instruction.place));
  if (instruction.no_grad) text += fmt::format(" {}", kNoGradWord);
  if (instruction.signal != Instruction::kNoSignal)
    text += " @" + signals.at(static_cast<size_t>(instruction.signal));
  if (instruction.line > 0) text += fmt::format(" #{}", instruction.line);
  return text;
}

std::string to_text(const Program& program) {
  std::string text = fmt::format("{}\n", kFormat);
  for (size_t i = 0; i < program.workers.size(); ++i)
    text += fmt::format("{} {} {}{}\n", kSignalWord, program.signals.at(i), kWorkersWord,
                        fmt::join(program.workers[i], ","));
  for (const DatasetSpec& dataset : program.datasets) text += to_text(dataset) + "\n";
  for (const Instruction& instruction : program.instructions)
    text += to_text(instruction, program.signals) + "\n";
  return text;
}

Program program_from_text(std::string_view text, const std::string& name) {
  Program program;
  bool has_format = false;
  const std::vector<std::string> lines = split(text, '\n');
  for (size_t line = 0; line < lines.size(); ++line) {
    const std::string_view said = std::string_view(lines[line]).substr(0, lines[line].find("//"));
    std::vector<std::string> words = words_of(said);
    if (words.empty()) continue;
    const std::string at = fmt::format("{}:{}", name, line + 1);
    if (!has_format && (words.size() != 1 || words.front() != kFormat)) {
      throw ConfigError("[plan.program] {}: a program begins with the line '{}'", at, kFormat);
    }
    if (has_format && words.front() == kSignalWord) {
      read_signal_line(words, at, program);
    } else if (has_format && words.front() == kDatasetWord) {
      program.datasets.push_back(dataset_from_text(said, at));
    } else if (has_format) {
      program.instructions.push_back(LineReader(std::move(words), at, program).read());
    }
    has_format = true;
  }
  if (!has_format) throw ConfigError("[plan.program] {}: no line says '{}'", name, kFormat);
  return program;
}

Program load_program(const std::string& path) {
  constexpr size_t kMostProgramText = size_t{64} << 20;
  return program_from_text(read_text_file(path, kMostProgramText), path);
}

}  // namespace trireme::plan
