#pragma once
// Follows a program of a controller and says for each instruction which workers take part and what each of
// them does: where the tensors lie, in which placement, what moves. The client knows so what is wrong before
// anything is sent, and every worker decides alike, since this is a function of the instructions alone.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "trireme/plan/instruction.h"
#include "trireme/plan/op_rules.h"

namespace trireme::plan {

/// A tensor of the program on its workers.
struct PlacedTensor {
  TensorType type;
  int64_t group = 0;          ///< in Placer::groups()
  TensorPlacement placement;  ///< of the value
  bool tracked = false;       ///< gradients end here
  bool needs_grad = false;    ///< gradients pass
  uint32_t line = 0;          ///< of the source that made it; 0: not known
};

/// The placement of a tensor's gradient while nothing moves it: that of the value, but every rank has the
/// whole of a summand's, since it is that of the sum.
TensorPlacement gradient_placement(const TensorPlacement& value);

/// A tensor that goes to other workers, or stays on its own and begins a graph of its own there.
struct PlacedCross {
  int64_t from = 0, to = 0;  ///< groups
  /// The placement in which it leaves one group and arrives in the other. Between groups of one size rank i
  /// sends what it has to rank i. Otherwise all have the whole, and rank i has it from rank i % the senders.
  TensorPlacement sent;
  int64_t bytes = 0;  ///< that all senders send together between the groups
};

struct PlacedInstruction {
  int64_t group = 0;                      ///< whose workers do it; of kCross both groups'
  std::shared_ptr<const OpPlan> op = {};  ///< kOp
  PlacedCross cross = {};                 ///< kCross
  std::vector<PlacedTensor> operands = {};
  std::vector<PlacedTensor> results = {};
};

class Placer {
 public:
  /// With is_explicit an operation that would move an operand unasked is an error.
  explicit Placer(bool is_explicit = false) : is_explicit_(is_explicit) {}

  /// Begins the messages about the instructions that follow: "train.cpp:17".
  void set_place(std::string place) { at_ = std::move(place); }

  /// The next signal of the program, whose instructions are done by these workers. Throws ConfigError for a
  /// name that is none, or used, and workers that are named twice.
  void add_signal(const std::string& name, const std::vector<int64_t>& workers);

  /// The next dataset of the program, numbered from 1. Throws ConfigError with its fault, and beyond
  /// kMostDatasets.
  void add_dataset(const DatasetSpec& dataset);

  /// Takes the next instruction. Throws ConfigError that has it as text, the tensors, and the fix, for
  /// records that cannot be, tensors that are not there or made twice, types and placements that an operation
  /// does not take, and tensors on other workers than the instruction's; then nothing has changed.
  PlacedInstruction place(const Instruction& instruction);

  /// Takes the next instruction without placing it: `placed` is what place() said of another one that was the
  /// same but for numbers (step_recording.h), with operands that lay alike.
  void follow(const Instruction& instruction, const PlacedInstruction& placed);

  /// A tensor that is there. Throws ConfigError for others.
  const PlacedTensor& tensor(uint32_t number) const;
  size_t tensors() const { return tensors_.size(); }
  /// Forgets all tensors; signals stay.
  void clear() { tensors_.clear(); }
  /// Lists of workers, one for each of those that signals have.
  const std::vector<std::vector<int64_t>>& groups() const { return groups_; }
  /// The group of a signal.
  int64_t group_of(int32_t signal) const;
  const std::vector<std::string>& signals() const { return signals_; }
  /// Dataset 1 is the first.
  const std::vector<DatasetSpec>& datasets() const { return datasets_; }

  /// XXH3-64 over all that was placed, equal on all who placed the same.
  uint64_t hash() const { return hash_; }

 private:
  struct Call;
  PlacedInstruction place_one(const Call& call);
  PlacedInstruction place_op(const Call& call);
  PlacedInstruction place_input(const Call& call) const;
  PlacedInstruction place_batch(const Call& call) const;
  PlacedInstruction placed_from_outside(const Call& call, const TensorType& type) const;
  PlacedInstruction place_cross(const Call& call) const;
  void check_backward(const Call& call) const;
  std::shared_ptr<const OpPlan> planned(const Call& call, int64_t ranks);
  std::vector<PlacedTensor> operands_of(const Instruction& instruction) const;
  int64_t group_for(const Call& call) const;
  std::string lies_on(int64_t group) const;
  [[noreturn]] void fail(const Instruction& instruction, const std::string& what) const;

  bool is_explicit_;
  std::string at_ = "a program";
  std::vector<std::string> signals_;
  std::vector<DatasetSpec> datasets_;
  std::vector<int64_t> group_of_signal_;
  std::vector<std::vector<int64_t>> groups_;
  std::unordered_map<uint32_t, PlacedTensor> tensors_;
  std::unordered_map<std::string, std::shared_ptr<const OpPlan>> plans_;  ///< by what they follow from
  uint64_t hash_ = 0;
};

}  // namespace trireme::plan
