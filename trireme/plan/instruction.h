#pragma once
// Programs of a controller as data: operations on numbered tensors, in records of one size and as text. An
// instruction names whole tensors; what a worker does for it follows from the placements of its signal
// (plan/op_rules.h). Nothing runs such programs yet: they are written, read, checked and compared.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "trireme/plan/ops.h"

namespace trireme::plan {

/// The kinds of instructions.
enum class InstructionKind {
  kOp,     ///< an operation
  kInput,  ///< a tensor that comes from outside of the program: a batch, a parameter
  kCross,  ///< a tensor goes to the workers of the instruction's signal; the result is another tensor
  kFree    ///< the operand's memory is free from here on
};

struct Instruction {
  static constexpr int32_t kNoSignal = -1;

  InstructionKind kind = InstructionKind::kOp;
  Op op = Op::kFull;           ///< kOp
  int32_t signal = kNoSignal;  ///< in Program::signals
  uint32_t line = 0;           ///< of the source that made it; 0: not known
  uint16_t inputs = 0, outputs = 0;
  std::array<uint32_t, kMostOpInputs> input{};
  std::array<uint32_t, kMostOpResults> output{};
  OpAttributes attributes = {};  ///< kInput: whole[0] is its dtype, the list its shape
  bool operator==(const Instruction&) const = default;
};
static_assert(std::is_trivially_copyable_v<Instruction>);

struct Program {
  std::vector<std::string> signals = {};  ///< names of scopes
  std::vector<Instruction> instructions = {};
  bool operator==(const Program&) const = default;
};

/// "t7 = matmul t5 t4 @pp_stage0_colpar #12": results, operation, operands, attributes that are not 0,
/// signal, and the line of the source.
std::string to_text(const Instruction& instruction, const std::vector<std::string>& signals);
/// One instruction a line, below a line that names the format.
std::string to_text(const Program& program);
/// Reads to_text(); blank lines and what follows "//" are ignored. Throws ConfigError that names `name`, the
/// line, what is wrong there, and the nearest word for one that is not known. Signals are numbered as they
/// come.
Program program_from_text(std::string_view text, const std::string& name);
/// Reads the file. Throws as above and as read_text_file().
Program load_program(const std::string& path);

/// XXH3-64 over the meaning of a program, equal on all machines: lines of the source do not count, names of
/// signals do. Throws ConfigError for records that cannot be.
uint64_t program_hash(const Program& program);

/// The types of all tensors that a program makes, by number. Throws ConfigError that names the instruction
/// and has its text, with the line of its source, for a tensor that is used before it is made or after it was
/// freed, made twice, types that an operation does not take, and numbers of results, signals or attributes
/// that cannot be.
std::map<uint32_t, TensorType> verify(const Program& program, const std::string& name);

}  // namespace trireme::plan
