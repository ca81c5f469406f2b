#include "trireme/plan/instruction_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace trireme::plan {
namespace {

/// Equal programs have one hash: what an instruction has no name for is 0.
std::string attribute_fault(const Instruction& instruction) {
  const OpRecord& names = attribute_names(instruction);
  const OpAttributes& has = instruction.attributes;
  for (size_t i = 0; i < has.whole.size(); ++i) {
    if (has.whole[i] != 0 && names.whole[i].empty())
      return fmt::format("whole number {} is {}, but it has none there", i, has.whole[i]);
  }
  for (size_t i = 0; i < has.real.size(); ++i) {
    if (!std::isfinite(has.real[i])) return "an attribute is no finite number";
    if (has.real[i] != 0.0 && names.real[i].empty())
      return fmt::format("number {} is {}, but it has none there", i, has.real[i]);
  }
  if (has.listed != 0 && names.list.empty())
    return fmt::format("it has a list of {}, but takes none", has.listed);
  for (size_t i = static_cast<size_t>(has.listed); i < has.list.size(); ++i) {
    if (has.list[i] != 0) return fmt::format("there is {} behind its list", has.list[i]);
  }
  return {};
}

std::string placement_fault(const Instruction& instruction) {
  const bool is_op = instruction.kind == InstructionKind::kOp;
  const bool can_place = makes_placed(instruction.kind);
  if (!is_op && instruction.no_grad) return "only operations are without gradients";
  if (instruction.place && !can_place) return "it makes no tensor that could be placed";
  if (instruction.place && instruction.place->dim < 0)
    return fmt::format("there is no dimension {} to place along", instruction.place->dim);
  return {};
}

}  // namespace

bool makes_placed(InstructionKind kind) {
  return kind == InstructionKind::kOp || kind == InstructionKind::kInput || kind == InstructionKind::kCross ||
         kind == InstructionKind::kBatch;
}

std::string record_fault(const Instruction& instruction, size_t signals) {
  if (instruction.inputs > kMostOpInputs || instruction.outputs > kMostOpResults)
    return fmt::format("it has {} operands and {} results; there may be {} and {}", instruction.inputs,
                       instruction.outputs, kMostOpInputs, kMostOpResults);
  if (instruction.signal < Instruction::kNoSignal || instruction.signal >= static_cast<int64_t>(signals))
    return fmt::format("there is no signal {}; the program has {}", instruction.signal, signals);
  const int64_t listed = instruction.attributes.listed;
  if (listed < 0 || listed > static_cast<int64_t>(OpAttributes::kMostListed))
    return fmt::format("a list of {} numbers; there may be {}", listed, OpAttributes::kMostListed);
  if (instruction.kind < InstructionKind::kOp || instruction.kind > InstructionKind::kBatch)
    return fmt::format("there is no kind {} of instruction", static_cast<int>(instruction.kind));
  if (static_cast<size_t>(instruction.op) >= kNames<Op>.size())
    return fmt::format("there is no operation {}", static_cast<size_t>(instruction.op));
  const std::string fault = attribute_fault(instruction);
  return fault.empty() ? placement_fault(instruction) : fault;
}

}  // namespace trireme::plan
