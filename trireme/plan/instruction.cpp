#include "trireme/plan/instruction.h"

#include <fmt/format.h>

#include <bit>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/plan/instruction_check.h"
#include "trireme/plan/placer.h"
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

/// A program in which every tensor lies on one worker: its types are those of the program on many.
class ProgramCheck {
 public:
  ProgramCheck(const Program& program, std::string name) : program_(program), name_(std::move(name)) {}

  void check_records() const {
    check_signals();
    check_datasets();
    for (size_t at = 0; at < program_.instructions.size(); ++at) {
      const std::string fault = record_fault(program_.instructions[at], program_.signals.size());
      if (!fault.empty()) throw ConfigError("[plan.program] {}: instruction {}: {}", name_, at + 1, fault);
    }
  }

  std::map<uint32_t, TensorType> verify() {
    check_records();
    for (const std::string& signal : program_.signals) placer_.add_signal(signal, {0});
    placer_.add_signal(kNowhere, {0});
    for (const DatasetSpec& dataset : program_.datasets) placer_.add_dataset(dataset);
    for (at_ = 0; at_ < program_.instructions.size(); ++at_) step(program_.instructions[at_]);
    return std::move(types_);
  }

 private:
  static constexpr const char* kNowhere = "no_signal";

  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError("[plan.program] {}: instruction {} '{}': {}", name_, at_ + 1,
                      to_text(program_.instructions[at_], program_.signals), what);
  }

  void check_signals() const {
    for (const std::string& signal : program_.signals) {
      if (!is_signal_name(signal))
        throw ConfigError("[plan.program] {}: '{}' is no name of a signal; use one word", name_, signal);
    }
    if (program_.workers.size() > program_.signals.size())
      throw ConfigError("[plan.program] {}: workers of {} signals, but there are {}", name_,
                        program_.workers.size(), program_.signals.size());
  }

  void check_datasets() const {
    for (size_t i = 0; i < program_.datasets.size(); ++i) {
      const std::string fault = dataset_fault(program_.datasets[i]);
      if (!fault.empty()) throw ConfigError("[plan.program] {}: dataset {}: {}", name_, i + 1, fault);
    }
  }

  void step(Instruction one) {
    for (size_t i = 0; i < one.inputs; ++i) {
      const auto freed = freed_.find(one.input[i]);
      if (freed != freed_.end())
        fail(fmt::format("t{} was freed by instruction {}; free it behind its last use", one.input[i],
                         freed->second));
    }
    for (size_t i = 0; i < one.outputs; ++i) {
      if (types_.contains(one.output[i]))
        fail(fmt::format("t{} is made twice; give the second another number", one.output[i]));
    }
    placer_.set_place(fmt::format("{}: instruction {}", name_, at_ + 1));
    const PlacedInstruction placed = placer_.place(one);
    for (size_t i = 0; i < one.outputs; ++i) types_.emplace(one.output[i], placed.results[i].type);
    if (one.kind == InstructionKind::kFree) freed_.emplace(one.input[0], at_ + 1);
  }

  const Program& program_;
  std::string name_;
  size_t at_ = 0;
  Placer placer_;
  std::map<uint32_t, TensorType> types_;
  std::map<uint32_t, size_t> freed_;  ///< the instruction that freed it, from 1
};

}  // namespace

const OpRecord& attribute_names(const Instruction& instruction) {
  static constexpr OpRecord kNone{};
  static constexpr OpRecord kOfInput{.whole = {"dtype", "from"}, .list = "shape"};
  static constexpr OpRecord kOfFetch{.whole = {"to"}};
  static constexpr OpRecord kOfBackward{.whole = {"later"}};
  static constexpr OpRecord kOfTrack{.whole = {"again"}};
  static constexpr OpRecord kOfBatch{.whole = {"dataset", "step", "targets"}};
  if (instruction.kind == InstructionKind::kOp) return record_of(instruction.op);
  if (instruction.kind == InstructionKind::kInput) return kOfInput;
  if (instruction.kind == InstructionKind::kTrack) return kOfTrack;
  if (instruction.kind == InstructionKind::kBatch) return kOfBatch;
  const bool goes_back =
      instruction.kind == InstructionKind::kBackward || instruction.kind == InstructionKind::kWeights;
  if (goes_back) return kOfBackward;
  return instruction.kind == InstructionKind::kFetch ? kOfFetch : kNone;
}

uint64_t program_hash(const Program& program) {
  ProgramCheck(program, "a program").check_records();
  Words words;
  for (const std::vector<int64_t>& workers : program.workers) {
    words.add(std::ssize(workers));
    for (const int64_t worker : workers) words.add(worker);
  }
  words.add(std::ssize(program.datasets));
  for (DatasetSpec dataset : program.datasets) {
    dataset.place.clear();
    words.add(to_text(dataset));
  }
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
    words.add(one.place ? to_text(*one.place) : std::string());
    words.add(int64_t{one.no_grad});
  }
  return words.hash();
}

std::map<uint32_t, TensorType> verify(const Program& program, const std::string& name) {
  return ProgramCheck(program, name).verify();
}

}  // namespace trireme::plan
