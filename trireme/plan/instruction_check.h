#pragma once
// Whether a record can be an instruction at all; it may come from another process. Private to
// plan/instruction*.cpp and plan/placer.cpp.
#include <cstddef>
#include <string>
#include <string_view>

#include "trireme/plan/instruction.h"

namespace trireme::plan {

/// The reason why a record is no instruction of a program with so many signals; empty: it is one.
std::string record_fault(const Instruction& instruction, size_t signals);

/// Whether instructions of the kind may say how their results are placed.
bool makes_placed(InstructionKind kind);

/// The word of its line: that of its kind, or of its operation.
std::string_view instruction_word(const Instruction& instruction);

}  // namespace trireme::plan
