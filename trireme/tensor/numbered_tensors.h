#pragma once
// The tensors of a controller's program on one rank: takes its instructions one after the other, places each
// as every rank does, and does this rank's share.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/comm/link.h"
#include "trireme/nn/deferred_gradients.h"
#include "trireme/plan/placer.h"

namespace trireme::comm {
class World;
}

namespace trireme::tensor {

/// Rows of a batch of a dataset of the program (plan/dataset_spec.h).
struct BatchRows {
  int64_t dataset = 1;  ///< from 1 on
  int64_t step = 0;
  bool targets = false;  ///< or inputs
  plan::Range rows = {};
};

/// Where values come from and go to that are not of the program.
class Outside {
 public:
  virtual ~Outside() = default;
  /// The whole value of an input, contiguous, on any device. The first rank of its group asks, once.
  virtual at::Tensor value(int64_t from, const plan::TensorType& type) = 0;
  /// The rows (rows, seq_len) int64, contiguous, on any device. Each rank asks for its own, whenever it needs
  /// some.
  virtual at::Tensor batch(const BatchRows& wanted) = 0;
  /// A fetched value as a whole, on the world's device, from the first rank of its group. It may still be
  /// computed there, on the current stream.
  virtual void answer(int64_t to, const at::Tensor& value) = 0;
};

class NumberedTensors {
 public:
  /// `world` and `outside` must outlive it. Ranks of the world are the workers of signals.
  NumberedTensors(comm::World& world, Outside& outside, bool is_explicit = false);
  ~NumberedTensors();
  NumberedTensors(const NumberedTensors&) = delete;
  NumberedTensors& operator=(const NumberedTensors&) = delete;

  /// Throws ConfigError also for workers that the world does not have.
  void add_signal(const std::string& name, const std::vector<int64_t>& workers);

  /// The next dataset of the program, which every rank is given. Throws as Placer does.
  void add_dataset(const plan::DatasetSpec& dataset) { placer_.add_dataset(dataset); }

  /// Runs the next instruction, which every rank of the world is given, in the same order. Collective over
  /// the ranks that it concerns; the others only follow where tensors lie. Messages to other groups leave
  /// without waiting for them, and what arrives is waited for at its first use. Throws ConfigError for what
  /// Placer refuses, CommError as collectives do, and what the operation throws; after that the ranks of its
  /// group no longer agree, and the program has ended.
  /// Returns whether this rank had a share of it.
  bool run(const plan::Instruction& instruction);

  /// As run(), of an instruction of a recorded step. `placed`: how it was placed when the step was made here
  /// first; null: this is the first time, which fills it in.
  bool run(const plan::Instruction& instruction, std::shared_ptr<const plan::PlacedInstruction>& placed);

  /// This rank's part of a tensor that lies here, for which it waits where it has not arrived. Collective
  /// over its group then. Throws ConfigError for others.
  at::Tensor& local(uint32_t number);
  const plan::Placer& placer() const { return placer_; }
  /// Forgets all tensors. Signals, groups and links stay.
  void clear();

 private:
  struct Meeting;  ///< of this rank with the ranks of another group
  struct Arrival;  ///< a tensor that crosses and was not waited for

  int64_t place_in(int64_t group) const;
  const std::shared_ptr<comm::Group>& group(int64_t number);
  Meeting& meeting(int64_t a, int64_t b);
  bool run_share(const plan::Instruction& instruction, const plan::PlacedInstruction& placed);
  void run_here(const plan::Instruction& instruction, const plan::PlacedInstruction& placed);
  void run_op(const plan::Instruction& instruction, const plan::PlacedInstruction& placed);
  void run_input(const plan::Instruction& instruction, const plan::PlacedInstruction& placed);
  void run_batch(const plan::Instruction& instruction, const plan::PlacedInstruction& placed);
  void keep_part(const plan::Instruction& instruction, const plan::PlacedInstruction& placed,
                 const at::Tensor& whole);
  void run_cross(const plan::Instruction& instruction, const plan::PlacedInstruction& placed);
  void run_backward(const plan::Instruction& instruction);
  void run_weights(int64_t later);
  void run_gradient(const plan::Instruction& instruction, const plan::PlacedInstruction& placed);
  void run_fetch(const plan::Instruction& instruction, const plan::PlacedInstruction& placed);
  at::Tensor moved(const at::Tensor& local, const plan::TensorPlacement& from,
                   const plan::TensorPlacement& to, int64_t group, const plan::Shape& whole);
  void send_across(const at::Tensor& sent, const plan::PlacedCross& cross);
  void expect(uint32_t number, const plan::PlacedTensor& made, const plan::PlacedCross& cross);
  at::Tensor take(Arrival& arrival);
  void track(uint32_t number, bool again);

  comm::World& world_;
  Outside& outside_;
  plan::Placer placer_;
  std::unordered_map<uint32_t, at::Tensor> tensors_;
  std::map<uint32_t, Arrival> arrivals_;
  std::unordered_map<uint32_t, at::Tensor> leaves_;  ///< where gradients of what crossed, or comes again, end
  std::map<int64_t, std::shared_ptr<comm::Group>> groups_;  ///< of several ranks, this one among them
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<Meeting>> meetings_;
  std::map<int64_t, nn::DeferredGradients> later_;  ///< of backward passes, by number
  at::Tensor own_message_;                          ///< of a rank that is in both groups of a crossing
};

}  // namespace trireme::tensor
