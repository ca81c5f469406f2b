#include "trireme/plan/step_recording.h"

#include <fmt/format.h>

#include <bit>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme::plan {
namespace {

/// Calls body with each number that may differ from step to step. Placements follow from none of them but
/// those of operands, and how these lie is in the digest.
template <typename Some, typename Body>
void for_each_number(Some& one, const Body& body) {
  body(one.line);
  for (size_t i = 0; i < one.inputs; ++i) body(one.input[i]);
  for (size_t i = 0; i < one.outputs; ++i) body(one.output[i]);
  auto& attributes = one.attributes;
  switch (one.kind) {
    case InstructionKind::kInput:
    case InstructionKind::kBatch:
      return body(attributes.whole[1]);
    case InstructionKind::kFetch:
    case InstructionKind::kBackward:
    case InstructionKind::kWeights:
      return body(attributes.whole[0]);
    case InstructionKind::kOp:
      break;
    default:
      return;
  }
  if (one.op == Op::kAdamw || one.op == Op::kDropout) body(attributes.whole[0]);
  if (one.op == Op::kRandn) body(attributes.whole[1]);
  if (one.op == Op::kDropout) return;  // its share decides what is planned
  for (auto& value : attributes.real) body(value);
}

/// A number as the arguments have it: whole ones as they are, real ones by their bits.
template <typename Number>
int64_t as_whole(const Number& number) {
  if constexpr (std::is_same_v<Number, double>)
    return std::bit_cast<int64_t>(number);
  else
    return static_cast<int64_t>(number);
}

int64_t difference_of(int64_t now, int64_t before) {
  return static_cast<int64_t>(static_cast<uint64_t>(now) - static_cast<uint64_t>(before));
}

Instruction without_numbers_of_step(Instruction one) {
  for_each_number(one, [](auto& number) { number = {}; });
  return one;
}

void put_number(std::string& bytes, uint64_t number) {
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(number >> shift));
}

[[noreturn]] void refuse_bytes() {
  throw DataError(
      "[plan.step_recording] bytes are no recorded step; another version of the program wrote them");
}

uint32_t get_number(std::string_view& bytes) {
  if (bytes.size() < 4) refuse_bytes();
  uint32_t number = 0;
  for (size_t i = 0; i < 4; ++i) number |= uint32_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  bytes.remove_prefix(4);
  return number;
}

void digest(std::string& bytes, const PlacedTensor& tensor) {
  put_number(bytes, static_cast<uint64_t>(tensor.type.dtype));
  put_number(bytes, tensor.type.shape.size());
  for (const int64_t size : tensor.type.shape)
    bytes.append(reinterpret_cast<const char*>(&size), sizeof size);
  put_number(bytes, static_cast<uint64_t>(tensor.group));
  put_number(bytes, static_cast<uint64_t>(tensor.placement.kind));
  put_number(bytes, static_cast<uint64_t>(tensor.placement.dim));
  put_number(bytes, (tensor.tracked ? 2U : 0U) + (tensor.needs_grad ? 1U : 0U));
}

}  // namespace

uint64_t digest_of(const PlacedInstruction& placed) {
  std::string bytes;
  put_number(bytes, static_cast<uint64_t>(placed.group));
  for (const PlacedTensor& tensor : placed.operands) digest(bytes, tensor);
  for (const PlacedTensor& tensor : placed.results) digest(bytes, tensor);
  return xxh3(bytes);
}

Instruction RecordedStep::made(size_t index, size_t& number, const std::vector<int64_t>& arguments) const {
  Instruction one = instructions.at(index);
  for_each_number(one, [&](auto& value) {
    const uint32_t group = groups.at(number++);
    if (group == 0) return;
    const int64_t argument = arguments.at(group - 1);
    using Number = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_same_v<Number, double>) {
      value = std::bit_cast<double>(argument);
    } else {
      const auto sum = static_cast<int64_t>(static_cast<uint64_t>(value) + static_cast<uint64_t>(argument));
      if (std::is_same_v<Number, uint32_t> && (sum < 0 || sum > std::numeric_limits<uint32_t>::max()))
        throw DataError("[plan.step_recording] tensor {} of a step cannot be; its arguments are damaged",
                        sum);
      value = static_cast<Number>(sum);
    }
  });
  return one;
}

std::string to_bytes(const RecordedStep& step) {
  std::string bytes;
  put_number(bytes, step.instructions.size());
  put_number(bytes, step.groups.size());
  put_number(bytes, step.is_real.size());
  for (const bool real : step.is_real) bytes.push_back(real ? 1 : 0);
  for (const uint32_t group : step.groups) put_number(bytes, group);
  for (const Instruction& one : step.instructions) append_bytes(bytes, one);
  return bytes;
}

RecordedStep step_from_bytes(std::string_view bytes) {
  RecordedStep step;
  const uint32_t instructions = get_number(bytes), numbers = get_number(bytes), arguments = get_number(bytes);
  if (arguments > kMostStepArguments || bytes.size() < arguments ||
      (bytes.size() - arguments) / 4 < numbers || bytes.size() < instructions)
    refuse_bytes();
  for (uint32_t i = 0; i < arguments; ++i) step.is_real.push_back(bytes[i] != 0);
  bytes.remove_prefix(arguments);
  for (uint32_t i = 0; i < numbers; ++i) step.groups.push_back(get_number(bytes));
  size_t number = 0;
  for (uint32_t i = 0; i < instructions; ++i) {
    step.instructions.push_back(take_instruction(bytes));
    for_each_number(step.instructions.back(), [&](auto& value) {
      const bool is_real = std::is_same_v<std::remove_cvref_t<decltype(value)>, double>;
      if (number >= step.groups.size()) refuse_bytes();
      const uint32_t group = step.groups[number++];
      if (group > arguments || (group > 0 && step.is_real[group - 1] != is_real)) refuse_bytes();
    });
  }
  if (number != numbers || !bytes.empty()) refuse_bytes();
  return step;
}

/// The first thing in which a step is not the recorded one, in words; empty: it differs in numbers alone.
std::string StepRecording::difference(const std::vector<MadeInstruction>& step,
                                      const std::vector<std::string>& signals) const {
  const size_t known = std::min(step.size(), bare_.size());
  for (size_t i = 0; i < known; ++i) {
    const Instruction &one = step[i].instruction, &before = step_.instructions[i];
    const bool is_same = without_numbers_of_step(one) == bare_[i];
    if (is_same && step[i].placed == placed_[i]) continue;
    const std::string now = to_text(one, signals);
    return is_same ? fmt::format("instruction {} '{}' is about tensors of another type, or in other places",
                                 i, now)
                   : fmt::format("instruction {} is '{}', and was '{}'", i, now, to_text(before, signals));
  }
  if (step.size() == bare_.size()) return {};
  return fmt::format("it has {} instructions, and had {}", step.size(), bare_.size());
}

StepRecording::StepRecording(const std::vector<MadeInstruction>& step) {
  for (const MadeInstruction& made : step) {
    step_.instructions.push_back(made.instruction);
    bare_.push_back(without_numbers_of_step(made.instruction));
    placed_.push_back(made.placed);
    for_each_number(made.instruction, [&](const auto&) { step_.groups.push_back(0); });
  }
}

/// Two instructions whose numbers were in one group and are not any more.
struct StepRecording::Parted {
  size_t one = 0, other = 0;
  bool is_new = false;  ///< the first change of a number that was in no group
};

std::string StepRecording::observe(const std::vector<MadeInstruction>& step,
                                   const std::vector<std::string>& signals) {
  const Parted parted = regroup(step);
  const auto words = [&](size_t at) {
    return fmt::format("instruction {} '{}'", at, to_text(step[at].instruction, signals));
  };
  ++version_;
  if (++times_ == 2) return "it was made for the second time";
  if (step_.is_real.size() > kMostStepArguments)
    return fmt::format("{} of its numbers change on their own, at most {} may", step_.is_real.size(),
                       kMostStepArguments);
  return parted.is_new ? fmt::format("a number of {} has changed for the first time", words(parted.one))
                       : fmt::format("numbers of {} and of {} have always changed alike, and now otherwise",
                                     words(parted.one), words(parted.other));
}

/// Numbers of a group stay together where they have changed alike: whole ones by the same difference, real
/// ones to the same value. Groups only ever divide, so that they come to an end.
StepRecording::Parted StepRecording::regroup(const std::vector<MadeInstruction>& step) {
  std::map<std::tuple<uint32_t, bool, int64_t>, uint32_t> groups;
  std::map<uint32_t, std::pair<int64_t, size_t>> first_changes;
  std::vector<bool> is_real;
  size_t number = 0;
  std::optional<Parted> parted;
  for (size_t i = 0; i < step.size(); ++i) {
    std::vector<int64_t> before;
    for_each_number(step_.instructions[i], [&](const auto& value) { before.push_back(as_whole(value)); });
    size_t at = 0;
    for_each_number(step[i].instruction, [&](const auto& value) {
      const bool real = std::is_same_v<std::remove_cvref_t<decltype(value)>, double>;
      uint32_t& group = step_.groups[number++];
      const int64_t now = as_whole(value), was = before[at++];
      if (group == 0 && now == was) return;
      const int64_t change = real ? now : difference_of(now, was);
      const auto [first, at_first] = first_changes.try_emplace(group, change, i).first->second;
      if (!parted && (group == 0 || first != change)) parted = Parted{at_first, i, group == 0};
      const auto [found, is_new] =
          groups.try_emplace({group, real, change}, static_cast<uint32_t>(groups.size() + 1));
      if (is_new) is_real.push_back(real);
      group = found->second;
    });
    step_.instructions[i] = step[i].instruction;
  }
  step_.is_real = std::move(is_real);
  return parted.value_or(Parted());
}

StepMatch::StepMatch(const StepRecording& recording)
    : recording_(recording),
      arguments_(recording.step_.is_real.size()),
      is_given_(recording.step_.is_real.size()) {}

bool StepMatch::take(const Instruction& instruction, uint64_t placed) {
  const RecordedStep& step = recording_.step_;
  if (is_complete() || recording_.placed_[next_] != placed) return false;
  if (without_numbers_of_step(instruction) != recording_.bare_[next_]) return false;
  std::array<int64_t, kMostOpInputs + kMostOpResults + OpAttributes::kMostWhole + OpAttributes::kMostReal + 1>
      before{};
  size_t at = 0;
  for_each_number(step.instructions[next_], [&](const auto& value) { before[at++] = as_whole(value); });
  bool follows = true;
  at = 0;
  for_each_number(instruction, [&](const auto& value) {
    const bool real = std::is_same_v<std::remove_cvref_t<decltype(value)>, double>;
    const uint32_t group = step.groups[number_++];
    const int64_t now = as_whole(value), was = before[at++];
    if (group == 0) {
      follows = follows && now == was;
      return;
    }
    const int64_t argument = real ? now : difference_of(now, was);
    if (!is_given_[group - 1]) arguments_[group - 1] = argument;
    is_given_[group - 1] = true;
    follows = follows && arguments_[group - 1] == argument;
  });
  ++next_;
  return follows;
}

}  // namespace trireme::plan
