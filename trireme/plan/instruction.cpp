#include "trireme/plan/instruction.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/plan/op_rules.h"
#include "trireme/plan/signals_yaml.h"

namespace trireme::plan {
namespace {

/// Numbers one behind the other, of one width on all machines, for the hash.
class Words {
 public:
  void add(int64_t value) {
    for (int byte = 0; byte < 8; ++byte)
      bytes_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * byte)));
  }
  void add(double value) { add(std::bit_cast<int64_t>(value)); }
  void add(std::string_view text) {
    add(std::ssize(text));
    bytes_ += text;
  }
  uint64_t hash() const { return xxh3(bytes_); }

 private:
  std::string bytes_;
};

class ProgramCheck {
 public:
  ProgramCheck(const Program& program, std::string name) : program_(program), name_(std::move(name)) {}

  void check_records() {
    for (const std::string& signal : program_.signals) {
      if (!is_signal_name(signal))
        throw ConfigError("[plan.program] {}: '{}' is no name of a signal; use one word", name_, signal);
    }
    for (at_ = 0; at_ < program_.instructions.size(); ++at_) check_record(program_.instructions[at_]);
    at_ = 0;
  }

  std::map<uint32_t, TensorType> verify() {
    check_records();
    for (; at_ < program_.instructions.size(); ++at_) {
      const Instruction& instruction = program_.instructions[at_];
      is_record_ = true;
      step(instruction);
    }
    return std::move(types_);
  }

 private:
  template <typename... Args>
  void require(bool holds, fmt::format_string<Args...> what, Args&&... args) const {
    if (!holds) fail(fmt::format(what, std::forward<Args>(args)...));
  }

  [[noreturn]] void fail(const std::string& what) const {
    const Instruction& instruction = program_.instructions[at_];
    const std::string text = is_record_ ? fmt::format(" '{}'", to_text(instruction, program_.signals)) : "";
    throw ConfigError("[plan.program] {}: instruction {}{}: {}", name_, at_ + 1, text, what);
  }

  /// A record may come from anywhere.
  void check_record(const Instruction& instruction) const {
    require(instruction.inputs <= kMostOpInputs && instruction.outputs <= kMostOpResults,
            "it has {} operands and {} results; there may be {} and {}", instruction.inputs,
            instruction.outputs, kMostOpInputs, kMostOpResults);
    require(instruction.signal >= Instruction::kNoSignal && instruction.signal < std::ssize(program_.signals),
            "there is no signal {}; the program has {}", instruction.signal, program_.signals.size());
    require(0 <= instruction.attributes.listed &&
                instruction.attributes.listed <= static_cast<int64_t>(OpAttributes::kMostListed),
            "a list of {} numbers; there may be {}", instruction.attributes.listed,
            OpAttributes::kMostListed);
    require(instruction.kind >= InstructionKind::kOp && instruction.kind <= InstructionKind::kFree,
            "there is no kind {} of instruction", static_cast<int>(instruction.kind));
    const auto number = static_cast<size_t>(instruction.op);
    require(number < kNames<Op>.size(), "there is no operation {}", number);
    require(
        std::ranges::all_of(instruction.attributes.real, [](double value) { return std::isfinite(value); }),
        "an attribute is no finite number");
    check_attributes(instruction);
  }

  /// Equal programs have one hash: what an instruction has no name for is 0.
  void check_attributes(const Instruction& instruction) const {
    const bool is_op = instruction.kind == InstructionKind::kOp,
               is_input = instruction.kind == InstructionKind::kInput;
    const OpRecord& record = record_of(is_op ? instruction.op : Op::kFull);
    const OpAttributes& has = instruction.attributes;
    const auto names = [&](std::string_view name) { return (is_op || is_input) && !name.empty(); };
    for (size_t i = 0; i < has.whole.size(); ++i)
      require(has.whole[i] == 0 || names(record.whole[i]), "whole number {} is {}, but it has none there", i,
              has.whole[i]);
    for (size_t i = 0; i < has.real.size(); ++i)
      require(has.real[i] == 0.0 || (is_op && names(record.real[i])),
              "number {} is {}, but it has none there", i, has.real[i]);
    require(has.listed == 0 || names(record.list), "it has a list of {}, but takes none", has.listed);
    for (size_t i = static_cast<size_t>(has.listed); i < has.list.size(); ++i)
      require(has.list[i] == 0, "there is {} behind its list", has.list[i]);
  }

  void step(const Instruction& instruction) {
    switch (instruction.kind) {
      case InstructionKind::kInput:
        return make(instruction, input_types(instruction));
      case InstructionKind::kFree:
        return free(instruction);
      case InstructionKind::kCross: {
        require(instruction.inputs == 1, "a tensor crosses alone, but there are {}", instruction.inputs);
        require(instruction.signal != Instruction::kNoSignal,
                "a tensor crosses to the workers of a signal; add '@'");
        return make(instruction, {type_of(instruction.input[0])});
      }
      case InstructionKind::kOp:
        return make(instruction, op_types(instruction));
    }
    throw LogicError("[plan.program] unknown kind {}", static_cast<int>(instruction.kind));
  }

  static std::vector<TensorType> types_of(const FactorMap& map) { return map.results; }

  std::vector<TensorType> input_types(const Instruction& instruction) const {
    require(instruction.inputs == 0, "an input has no operands");
    return in_words([&] { return types_of(factor_map(Op::kFull, {}, instruction.attributes)); });
  }

  std::vector<TensorType> op_types(const Instruction& instruction) const {
    std::vector<TensorType> operands;
    for (size_t i = 0; i < instruction.inputs; ++i) operands.push_back(type_of(instruction.input[i]));
    return in_words([&] { return types_of(factor_map(instruction.op, operands, instruction.attributes)); });
  }

  /// The refusal of operands by an operation, with the place of the instruction.
  template <typename Body>
  std::vector<TensorType> in_words(const Body& body) const {
    try {
      return body();
    } catch (const ConfigError& error) {
      fail(error.what());
    }
  }

  const TensorType& type_of(uint32_t tensor) const {
    const auto freed = freed_.find(tensor);
    if (freed != freed_.end())
      fail(
          fmt::format("t{} was freed by instruction {}; free it behind its last use", tensor, freed->second));
    const auto found = types_.find(tensor);
    require(found != types_.end(), "t{} is used before it is made", tensor);
    return found->second;
  }

  void make(const Instruction& instruction, const std::vector<TensorType>& types) {
    require(instruction.outputs == types.size(), "it has {} results, and names {}", types.size(),
            instruction.outputs);
    for (size_t i = 0; i < types.size(); ++i) {
      const uint32_t tensor = instruction.output[i];
      const bool is_new = types_.emplace(tensor, types[i]).second;
      require(is_new, "t{} is made twice; give the second another number", tensor);
    }
  }

  void free(const Instruction& instruction) {
    require(instruction.inputs == 1 && instruction.outputs == 0, "'free' takes one tensor");
    type_of(instruction.input[0]);
    freed_.emplace(instruction.input[0], at_ + 1);
  }

  const Program& program_;
  std::string name_;
  size_t at_ = 0;
  bool is_record_ = false;  ///< the instruction can be printed
  std::map<uint32_t, TensorType> types_;
  std::map<uint32_t, size_t> freed_;  ///< the instruction that freed it, from 1
};

}  // namespace

uint64_t program_hash(const Program& program) {
  ProgramCheck(program, "a program").check_records();
  Words words;
  words.add(std::ssize(program.instructions));
  for (const Instruction& one : program.instructions) {
    words.add(static_cast<int64_t>(one.kind));
    words.add(one.kind == InstructionKind::kOp ? name(one.op) : std::string_view());
    words.add(one.signal == Instruction::kNoSignal ? std::string_view()
                                                   : program.signals.at(static_cast<size_t>(one.signal)));
    words.add(int64_t{one.inputs});
    words.add(int64_t{one.outputs});
    for (size_t i = 0; i < one.inputs; ++i) words.add(int64_t{one.input[i]});
    for (size_t i = 0; i < one.outputs; ++i) words.add(int64_t{one.output[i]});
    for (const int64_t value : one.attributes.whole) words.add(value);
    for (const double value : one.attributes.real) words.add(value);
    words.add(one.attributes.listed);
    for (const int64_t value : one.attributes.items()) words.add(value);
  }
  return words.hash();
}

std::map<uint32_t, TensorType> verify(const Program& program, const std::string& name) {
  return ProgramCheck(program, name).verify();
}

}  // namespace trireme::plan
