#pragma once
// A step of a program that is made again and again. Its instructions are the same each time but for numbers:
// of tensors, of optimizer steps, of seeds, learning rates. Whoever has them needs only what these numbers
// follow from to make a step again. As torch's CUDA graphs and Monarch's recordings do it, except that the
// program still runs, so that nothing that it reads can change unseen.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/plan/instruction.h"
#include "trireme/plan/placer.h"

namespace trireme::plan {

/// The instructions of a step, which numbers of them change from step to step, and which change alike.
struct RecordedStep {
  std::vector<Instruction> instructions = {};
  /// Of each number, in the order of instructions: 0, it stays; n, it follows argument n - 1.
  std::vector<uint32_t> groups = {};
  /// Of each argument: a real number, which replaces those of its group, or what is added to whole ones.
  std::vector<bool> is_real = {};

  /// Instruction `index`, whose numbers begin at `number`, which is moved behind them. Throws DataError for
  /// numbers of tensors that cannot be.
  Instruction made(size_t index, size_t& number, const std::vector<int64_t>& arguments) const;
};
/// The same on all machines.
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

/// What the steps that were seen have in common.
class StepRecording {
 public:
  /// Takes a step as it was made. Where it is the last one but for numbers, it says more about these;
  /// otherwise what is known begins anew with it, and why() says what differs.
  /// `signals`: the program's, for these words.
  void observe(const std::vector<MadeInstruction>& step, const std::vector<std::string>& signals);

  /// Whether two steps in a row were the same, so that the next one may be compared.
  bool is_known() const { return times_ > 1; }
  const RecordedStep& step() const { return step_; }
  /// Counts changes of step().
  uint64_t version() const { return version_; }
  /// What was new in the step that was observed last.
  const std::string& why() const { return why_; }

 private:
  friend class StepMatch;
  std::string difference(const std::vector<MadeInstruction>& step,
                         const std::vector<std::string>& signals) const;
  std::pair<size_t, size_t> regroup(const std::vector<MadeInstruction>& step);

  RecordedStep step_;
  std::vector<Instruction> bare_;  ///< without numbers
  std::vector<uint64_t> placed_;
  uint64_t version_ = 0, times_ = 0;
  std::string why_;
};

/// Follows a step while it is made, as long as it is the recorded one.
class StepMatch {
 public:
  /// `recording` is_known() and must outlive this, unchanged.
  explicit StepMatch(const StepRecording& recording);
  /// Whether the next instruction is the recorded one, with numbers that follow as the others do.
  bool take(const Instruction& instruction, uint64_t placed);
  bool is_complete() const { return next_ == recording_.step_.instructions.size(); }
  /// What the numbers of this step follow from.
  const std::vector<int64_t>& arguments() const { return arguments_; }

 private:
  const StepRecording& recording_;
  size_t next_ = 0, number_ = 0;
  std::vector<int64_t> arguments_;
  std::vector<bool> is_given_;
};

}  // namespace trireme::plan
