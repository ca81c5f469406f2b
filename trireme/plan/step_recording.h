#pragma once
// A step of a program that is made again and again. Its instructions are the same each time but for numbers:
// of tensors, of optimizer steps, of seeds, learning rates, source lines. A worker that has the instructions
// makes the step again from a few arguments, from which these numbers follow. Recordings of CUDA graphs and
// of Monarch are alike, but here the program still runs, so that nothing that it reads can change unseen.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/plan/instruction.h"
#include "trireme/plan/placer.h"

namespace trireme::plan {

inline constexpr size_t kMostStepArguments = 4096;
/// Steps that the workers of a session keep.
inline constexpr size_t kMostRecordedSteps = 1024;

/// The instructions of a step, which numbers of them change from step to step, and which change alike.
struct RecordedStep {
  std::vector<Instruction> instructions = {};
  /// The group of each number, in the order of instructions: 0, it stays; n, it follows argument n - 1.
  std::vector<uint32_t> groups = {};
  /// Kinds of arguments: a real number replaces those of its group, a whole one is added to them.
  std::vector<bool> is_real = {};

  /// Instruction `index`, whose numbers begin at `number`, which is moved behind them. Throws DataError for
  /// numbers of tensors that cannot be.
  Instruction made(size_t index, size_t& number, const std::vector<int64_t>& arguments) const;
};
/// Bytes that are the same on all machines.
std::string to_bytes(const RecordedStep& step);
/// Throws DataError for what to_bytes() did not write.
RecordedStep step_from_bytes(std::string_view bytes);

/// An instruction as it was made, and a digest of how its tensors lie: a placement follows from tensors that
/// may have been made before the step.
struct MadeInstruction {
  Instruction instruction;
  uint64_t placed = 0;
};
/// XXH3-64 over workers, types and placements of operands and results.
uint64_t digest_of(const PlacedInstruction& placed);

/// A step that was made one time or more: what stays, and what its numbers follow from.
class StepRecording {
 public:
  explicit StepRecording(const std::vector<MadeInstruction>& step);

  /// The first thing in which another step differs, in words; empty: it is the same but for numbers.
  /// `signals`: the program's, for these words.
  std::string difference(const std::vector<MadeInstruction>& step,
                         const std::vector<std::string>& signals) const;
  /// Takes the step as it was made once more; it has no difference(). Returns which of its numbers did not
  /// follow from those before, in words.
  std::string observe(const std::vector<MadeInstruction>& step, const std::vector<std::string>& signals);

  /// Whether it was made at least twice, so that the next time may be compared, and follows from few
  /// arguments.
  bool is_known() const { return times_ > 1 && step_.is_real.size() <= kMostStepArguments; }
  const RecordedStep& step() const { return step_; }
  /// Counts changes of step(), from 1 on.
  uint64_t version() const { return version_; }

 private:
  friend class StepMatch;
  struct Parted;
  Parted regroup(const std::vector<MadeInstruction>& step);

  RecordedStep step_;
  std::vector<Instruction> bare_;  ///< without numbers
  std::vector<uint64_t> placed_;
  uint64_t version_ = 1, times_ = 1;
};

/// Follows a step while it is made, as long as it is the recorded one.
class StepMatch {
 public:
  /// `recording` is_known() and must outlive this, unchanged.
  explicit StepMatch(const StepRecording& recording);
  /// Whether the next instruction is the recorded one, with numbers that follow as the others do.
  bool take(const Instruction& instruction, uint64_t placed);
  bool is_complete() const { return next_ == recording_.step_.instructions.size(); }
  /// The arguments from which the numbers of this step follow.
  const std::vector<int64_t>& arguments() const { return arguments_; }

 private:
  const StepRecording& recording_;
  size_t next_ = 0, number_ = 0;
  std::vector<int64_t> arguments_;
  std::vector<bool> is_given_;
};

}  // namespace trireme::plan
