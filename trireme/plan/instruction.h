#pragma once
// Programs of a controller as data: operations on numbered tensors, in records of one size, as bytes and as
// text. An instruction names whole tensors; what each worker does for it follows from their placements
// (plan/placer.h).
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "trireme/plan/dataset_spec.h"
#include "trireme/plan/ops.h"
#include "trireme/plan/placement.h"

namespace trireme::plan {

/// The kinds of instructions.
enum class InstructionKind {
  kOp,     ///< an operation
  kInput,  ///< a tensor that comes from outside of the program: a batch, a parameter
  kCross,  ///< a tensor goes to the workers of the instruction's signal; the result is another tensor
  kFree,   ///< the operand's memory is free from here on
  /// Gradients end at the operand, which collects them: a parameter, what has crossed, or with "again" what
  /// will be computed again for its gradient.
  kTrack,
  /// Gradients of the operands, roots before their gradients; a root alone is a scalar whose is 1. With a
  /// number "later" those of weights wait for the kWeights of this number, where operations can leave them.
  kBackward,
  kGradient,  ///< the result is what the operand has collected, which begins anew
  kFetch,     ///< the operand's value goes to the client
  kWeights,   ///< gradients of weights that a backward pass has left for later
  kBatch      ///< inputs or targets of a dataset's batch, of which each worker reads its own rows
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
  OpAttributes attributes = {};  ///< as attribute_names() has them
  bool no_grad = false;          ///< kOp: gradients do not pass
  std::optional<TensorPlacement> place =
      {};  ///< kOp, kInput, kCross, kBatch: of results; none: what is cheapest
  bool operator==(const Instruction&) const = default;
};
static_assert(std::is_trivially_copyable_v<Instruction>);

/// The names of an instruction's attributes: those of its operation; a dtype, a shape and the number of the
/// value "from" outside of an input; the number "to" which a fetched value belongs; a "dataset" of the
/// program, from 1 on, with the "step" of a batch, and "targets" 1 where these are meant.
const OpRecord& attribute_names(const Instruction& instruction);

struct Program {
  std::vector<std::string> signals = {};           ///< names of scopes
  std::vector<std::vector<int64_t>> workers = {};  ///< of the first signals; empty: a file of signals says
  std::vector<DatasetSpec> datasets = {};          ///< numbered from 1
  std::vector<Instruction> instructions = {};
  bool operator==(const Program&) const = default;
};

/// "t7 = matmul t5 t4 place=S(1) @pp_stage0_colpar #12": results, operation, operands, attributes that are
/// not 0, the placement that is asked for, "no_grad", signal, and the line of the source.
std::string to_text(const Instruction& instruction, const std::vector<std::string>& signals);
/// One instruction a line, below a line that names the format and one for each signal that has workers:
/// "signal pp_stage0 workers=0,1", and each dataset (dataset_spec.h).
std::string to_text(const Program& program);
/// Reads to_text(); blank lines and what follows "//" are ignored. Throws ConfigError that names `name`, the
/// line, what is wrong there, and the nearest word for one that is not known. Signals and datasets are
/// numbered as they come; a signal's workers stand before what names it.
Program program_from_text(std::string_view text, const std::string& name);
/// Reads the file. Throws as above and as read_text_file().
Program load_program(const std::string& path);

/// Appends some 20 bytes, the same on all machines.
void append_bytes(std::string& bytes, const Instruction& instruction);
/// The instruction that `bytes` begin with, which are taken off. Throws DataError for what no append_bytes()
/// wrote; numbers of operations, signals and operands are in range afterwards.
Instruction take_instruction(std::string_view& bytes);

/// XXH3-64 over the meaning of a program, equal on all machines: lines of the source do not count, names of
/// signals do. Throws ConfigError for records that cannot be.
uint64_t program_hash(const Program& program);

/// The types of all tensors that a program makes, by number. Throws ConfigError that names the instruction
/// and has its text, with the line of its source, for a tensor that is used before it is made or after it was
/// freed, made twice, types that an operation does not take, and numbers of results, signals or attributes
/// that cannot be.
std::map<uint32_t, TensorType> verify(const Program& program, const std::string& name);

}  // namespace trireme::plan
