#include "trireme/tensor/numbered_tensors.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <deque>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/comm/world.h"
#include "trireme/tensor/op_kernels.h"
#include "trireme/tensor/redistribute.h"

namespace trireme::tensor {

using plan::Instruction;
using plan::InstructionKind;
using plan::PlacedCross;
using plan::PlacedInstruction;
using plan::PlacedTensor;
using plan::TensorPlacement;

/// Links to and from ranks of the other group, by global rank. Both directions are made at the first
/// crossing, so that no rank waits for another one when the first gradient comes back.
struct NumberedTensors::Meeting {
  /// Tensors that were posted on a link and not waited for, the oldest first.
  struct Receiver {
    std::shared_ptr<comm::Link> link;
    std::deque<uint32_t> posted = {};
  };
  std::map<int64_t, std::shared_ptr<comm::Link>> to = {};
  std::map<int64_t, Receiver> from = {};
};

struct NumberedTensors::Arrival {
  plan::PlacedTensor made;
  TensorPlacement sent;
  Meeting::Receiver* receiver = nullptr;
  at::Tensor value = {};  ///< as it was sent; undefined: it was not waited for
  bool tracked = false;
};

NumberedTensors::NumberedTensors(comm::World& world, Outside& outside, bool is_explicit)
    : world_(world), outside_(outside), placer_(is_explicit) {}
NumberedTensors::~NumberedTensors() = default;

void NumberedTensors::add_signal(const std::string& name, const std::vector<int64_t>& workers) {
  const auto outside = std::ranges::find_if(workers, [this](int64_t one) { return one >= world_.size(); });
  if (outside != workers.end())
    throw ConfigError("[tensor.program] signal {} has worker {}, and there are {}: 0 to {}", name, *outside,
                      world_.size(), world_.size() - 1);
  placer_.add_signal(name, workers);
}

at::Tensor& NumberedTensors::local(uint32_t number) {
  const auto arrival = arrivals_.find(number);
  if (arrival != arrivals_.end()) {
    at::Tensor value = take(arrival->second);
    if (arrival->second.tracked) {
      // What crossed is a view of its leaf: only parameters are leaves themselves, whose gradients may wait.
      const at::Tensor leaf = value.requires_grad_(true);
      leaves_.emplace(number, leaf);
      value = leaf.view_as(leaf);
    }
    arrivals_.erase(arrival);
    return tensors_.emplace(number, std::move(value)).first->second;
  }
  const auto found = tensors_.find(number);
  if (found == tensors_.end())
    throw ConfigError("[tensor.program] t{} is not on worker {}", number, world_.rank());
  return found->second;
}

void NumberedTensors::clear() {
  while (!arrivals_.empty()) local(arrivals_.begin()->first);
  tensors_.clear();
  leaves_.clear();
  later_.clear();
  placer_.clear();
}

/// This rank's place in a group; -1: it is not in it.
int64_t NumberedTensors::place_in(int64_t group) const {
  const std::vector<int64_t>& ranks = placer_.groups()[static_cast<size_t>(group)];
  const auto found = std::ranges::find(ranks, world_.rank());
  return found == ranks.end() ? -1 : found - ranks.begin();
}

/// Null for one rank alone.
const std::shared_ptr<comm::Group>& NumberedTensors::group(int64_t number) {
  static const std::shared_ptr<comm::Group> kAlone;
  const std::vector<int64_t>& ranks = placer_.groups()[static_cast<size_t>(number)];
  if (ranks.size() == 1) return kAlone;
  std::shared_ptr<comm::Group>& group = groups_[number];
  if (!group) group = world_.make_group(fmt::format("workers {}", fmt::join(ranks, " ")), ranks);
  return group;
}

bool NumberedTensors::run(const Instruction& instruction) {
  return run_share(instruction, placer_.place(instruction));
}

bool NumberedTensors::run(const Instruction& instruction, std::shared_ptr<const PlacedInstruction>& placed) {
  if (placed) {
    placer_.follow(instruction, *placed);
  } else {
    placed = std::make_shared<const PlacedInstruction>(placer_.place(instruction));
  }
  return run_share(instruction, *placed);
}

/// Does what this rank has to do for it, if anything.
bool NumberedTensors::run_share(const Instruction& instruction, const PlacedInstruction& placed) {
  const bool takes_part = place_in(placed.group) >= 0 ||
                          (instruction.kind == InstructionKind::kCross && place_in(placed.cross.from) >= 0);
  if (takes_part) run_here(instruction, placed);
  return takes_part;
}

void NumberedTensors::run_here(const Instruction& instruction, const PlacedInstruction& placed) {
  switch (instruction.kind) {
    case InstructionKind::kOp:
      return run_op(instruction, placed);
    case InstructionKind::kInput:
      return run_input(instruction, placed);
    case InstructionKind::kCross:
      return run_cross(instruction, placed);
    case InstructionKind::kBatch:
      return run_batch(instruction, placed);
    case InstructionKind::kFree:
      local(instruction.input[0]);  // a message that nobody used is on its way
      tensors_.erase(instruction.input[0]);
      leaves_.erase(instruction.input[0]);
      return;
    case InstructionKind::kTrack:
      return track(instruction.input[0], instruction.attributes.whole[0] != 0);
    case InstructionKind::kBackward:
      return run_backward(instruction);
    case InstructionKind::kWeights:
      return run_weights(instruction.attributes.whole[0]);
    case InstructionKind::kGradient:
      return run_gradient(instruction, placed);
    case InstructionKind::kFetch:
      return run_fetch(instruction, placed);
  }
}

void NumberedTensors::run_op(const Instruction& instruction, const PlacedInstruction& placed) {
  std::vector<at::Tensor> inputs;
  std::vector<plan::TensorType> types;
  for (size_t i = 0; i < instruction.inputs; ++i) {
    inputs.push_back(local(instruction.input[i]));
    types.push_back(placed.operands[i].type);
  }
  const at::AutoGradMode grad_mode(!instruction.no_grad);
  const PlannedOp planned{instruction.op, instruction.attributes, *placed.op, types, world_.device()};
  const std::vector<at::Tensor> results = run_planned(planned, inputs, group(placed.group));
  for (size_t i = 0; i < instruction.outputs; ++i) tensors_.emplace(instruction.output[i], results[i]);
}

at::Tensor NumberedTensors::moved(const at::Tensor& local, const TensorPlacement& from,
                                  const TensorPlacement& to, int64_t number, const plan::Shape& whole) {
  const std::shared_ptr<comm::Group>& ranks = group(number);
  if (!ranks || from == to) return local.detach();
  const at::NoGradGuard no_grad;
  return redistribute(local.detach(), from, to, *ranks, whole);
}

void NumberedTensors::run_input(const Instruction& instruction, const PlacedInstruction& placed) {
  const PlacedTensor& made = placed.results[0];
  const bool asks = place_in(placed.group) == 0;
  const auto options = at::TensorOptions(scalar_type_of(made.type.dtype)).device(world_.device());
  at::Tensor whole = asks ? outside_.value(instruction.attributes.whole[1], made.type).to(world_.device())
                          : at::empty(made.type.shape, options);
  if (const std::shared_ptr<comm::Group>& ranks = group(placed.group)) ranks->broadcast(whole, 0);
  keep_part(instruction, placed, whole);
}

/// Each rank reads what it has: rows that are split are read by the one that has them.
void NumberedTensors::run_batch(const Instruction& instruction, const PlacedInstruction& placed) {
  const PlacedTensor& made = placed.results[0];
  const bool by_rows = made.placement == TensorPlacement::shard(0);
  const auto ranks = std::ssize(placer_.groups()[static_cast<size_t>(placed.group)]);
  const int64_t rows = made.type.shape[0];
  const auto& whole = instruction.attributes.whole;
  const BatchRows wanted{.dataset = whole[0],
                         .step = whole[1],
                         .targets = whole[2] != 0,
                         .rows = by_rows ? plan::shard_range(rows, ranks, place_in(placed.group))
                                         : plan::Range{.begin = 0, .end = rows}};
  const at::Tensor read = outside_.batch(wanted).to(world_.device());
  if (by_rows)
    tensors_.emplace(instruction.output[0], read);
  else
    keep_part(instruction, placed, read);
}

/// This rank's part of a value that all ranks of the group have as a whole.
void NumberedTensors::keep_part(const Instruction& instruction, const PlacedInstruction& placed,
                                const at::Tensor& whole) {
  const PlacedTensor& made = placed.results[0];
  at::Tensor part = moved(whole, TensorPlacement::replicate(), made.placement, placed.group, made.type.shape);
  // A part that is a view would keep the whole.
  if (part.nbytes() < whole.nbytes() && part.is_alias_of(whole)) part = part.clone();
  tensors_.emplace(instruction.output[0], part);
}

/// Called by the ranks of both groups at the same instruction. Ranks that meet make their links in one order.
NumberedTensors::Meeting& NumberedTensors::meeting(int64_t a, int64_t b) {
  const std::pair<int64_t, int64_t> key = std::minmax(a, b);
  std::unique_ptr<Meeting>& met = meetings_[key];
  if (met) return *met;
  auto made = std::make_unique<Meeting>();
  const int64_t self = world_.rank();
  const auto connect = [&](int64_t from, int64_t to) {
    if (from == to) return;
    if (from == self) made->to.emplace(to, comm::make_link(world_, from, to));
    if (to == self) made->from.emplace(from, Meeting::Receiver{comm::make_link(world_, from, to)});
  };
  for (const int64_t one : placer_.groups()[static_cast<size_t>(key.first)]) {
    for (const int64_t other : placer_.groups()[static_cast<size_t>(key.second)]) {
      connect(one, other);
      connect(other, one);
    }
  }
  met = std::move(made);
  return *met;
}

void NumberedTensors::run_cross(const Instruction& instruction, const PlacedInstruction& placed) {
  const PlacedTensor &source = placed.operands[0], &made = placed.results[0];
  const PlacedCross& cross = placed.cross;
  const uint32_t number = instruction.output[0];
  if (place_in(cross.from) >= 0) {
    const at::Tensor sent =
        moved(local(instruction.input[0]), source.placement, cross.sent, cross.from, source.type.shape);
    if (cross.from == cross.to) {
      arrivals_.emplace(number, Arrival{.made = made, .sent = cross.sent, .value = sent});
      return;
    }
    // Nobody writes to what is on its way, and the program may write to the source.
    send_across(sent.is_alias_of(local(instruction.input[0])) ? sent.clone(at::MemoryFormat::Contiguous)
                                                              : sent.contiguous(),
                cross);
  }
  if (place_in(cross.to) >= 0) expect(number, made, cross);
}

/// Rank i of the receivers has what rank i % senders sends, itself included.
void NumberedTensors::send_across(const at::Tensor& sent, const PlacedCross& cross) {
  const std::vector<int64_t>& receivers = placer_.groups()[static_cast<size_t>(cross.to)];
  const size_t senders = placer_.groups()[static_cast<size_t>(cross.from)].size();
  Meeting& met = meeting(cross.from, cross.to);
  for (auto to = static_cast<size_t>(place_in(cross.from)); to < receivers.size(); to += senders) {
    if (receivers[to] == world_.rank())
      own_message_ = sent;
    else
      met.to.at(receivers[to])->send(sent);
  }
}

void NumberedTensors::expect(uint32_t number, const PlacedTensor& made, const PlacedCross& cross) {
  const std::vector<int64_t>& senders = placer_.groups()[static_cast<size_t>(cross.from)];
  const auto ranks = std::ssize(placer_.groups()[static_cast<size_t>(cross.to)]);
  const int64_t place = place_in(cross.to);
  const int64_t from = senders[static_cast<size_t>(place) % senders.size()];
  Arrival arrival{.made = made, .sent = cross.sent};
  if (from == world_.rank()) {
    arrival.value = std::exchange(own_message_, {});
  } else {
    const plan::Shape shape = part_shape(made.type.shape, cross.sent, ranks, place);
    arrival.receiver = &meeting(cross.from, cross.to).from.at(from);
    arrival.receiver->link->post(
        at::empty(shape, at::TensorOptions(scalar_type_of(made.type.dtype)).device(world_.device())));
    arrival.receiver->posted.push_back(number);
  }
  arrivals_.emplace(number, std::move(arrival));
}

/// Messages on a link are waited for in their order: those before this one are kept until they are used.
at::Tensor NumberedTensors::take(Arrival& arrival) {
  while (!arrival.value.defined()) {
    const uint32_t oldest = arrival.receiver->posted.front();
    arrival.receiver->posted.pop_front();
    arrivals_.at(oldest).value = arrival.receiver->link->wait();
  }
  const PlacedTensor& made = arrival.made;
  return moved(arrival.value, arrival.sent, made.placement, made.group, made.type.shape);
}

/// A tensor that has not arrived is tracked when it has.
/// Only parameters are leaves themselves, whose gradients may wait: of others those are used next.
void NumberedTensors::track(uint32_t number, bool again) {
  const auto arrival = arrivals_.find(number);
  if (arrival != arrivals_.end()) {
    arrival->second.tracked = true;
    return;
  }
  at::Tensor& tensor = local(number);
  tensor = tensor.detach().requires_grad_(true);
  if (!again) return;
  leaves_.emplace(number, tensor);
  tensor = tensor.view_as(tensor);
}

void NumberedTensors::run_backward(const Instruction& instruction) {
  const size_t roots = instruction.inputs == 1 ? 1 : instruction.inputs / 2u;
  std::vector<at::Tensor> tensors, gradients;
  for (size_t i = 0; i < roots; ++i) {
    const at::Tensor& root = local(instruction.input[i]);
    tensors.push_back(root);
    gradients.push_back(instruction.inputs == 1 ? at::ones_like(root) : local(instruction.input[roots + i]));
  }
  const int64_t later = instruction.attributes.whole[0];
  std::optional<nn::DeferredGradients::Scope> scope;
  if (later != 0) scope.emplace(later_[later]);
  torch::autograd::backward(tensors, gradients);
}

void NumberedTensors::run_weights(int64_t later) {
  const auto found = later_.find(later);
  if (found == later_.end())
    throw ConfigError("[tensor.program] no backward pass has left gradients for later={}", later);
  found->second.run();
  later_.erase(found);
}

void NumberedTensors::run_gradient(const Instruction& instruction, const PlacedInstruction& placed) {
  const uint32_t number = instruction.input[0];
  at::Tensor& here = local(number);
  const auto crossed = leaves_.find(number);
  at::Tensor& leaf = crossed == leaves_.end() ? here : crossed->second;
  at::Tensor gradient = leaf.grad();
  leaf.mutable_grad() = at::Tensor();
  if (!gradient.defined()) gradient = at::zeros_like(leaf, leaf.options().requires_grad(false));
  // Every rank holds a term of a tracked sum, and its gradient has the shape of the whole, as the term has.
  TRIREME_CHECK(gradient.sizes() == leaf.sizes(), "[tensor.program] a gradient of another shape: {}",
                plan::to_text(placed.results[0].placement));
  tensors_.emplace(instruction.output[0], gradient.detach());
}

void NumberedTensors::run_fetch(const Instruction& instruction, const PlacedInstruction& placed) {
  const PlacedTensor& tensor = placed.operands[0];
  const at::Tensor whole = moved(local(instruction.input[0]), tensor.placement, TensorPlacement::replicate(),
                                 placed.group, tensor.type.shape);
  if (place_in(placed.group) == 0) outside_.answer(instruction.attributes.whole[0], whole.contiguous());
}

}  // namespace trireme::tensor
