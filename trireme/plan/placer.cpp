#include "trireme/plan/placer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/plan/instruction_check.h"
#include "trireme/plan/signals_yaml.h"

namespace trireme::plan {
namespace {

/// Appends numbers to the text that stands for all that a plan follows from.
template <typename Number>
void append_raw(std::string& key, const Number& number) {
  key.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void append_raw(std::string& key, const TensorPlacement& placement) {
  append_raw(key, static_cast<int64_t>(placement.kind));
  append_raw(key, placement.dim);
}

std::string plan_key(const Instruction& one, const std::vector<PlacedTensor>& operands, int64_t ranks) {
  std::string key;
  append_raw(key, static_cast<int64_t>(one.op));
  append_raw(key, ranks);
  for (const int64_t value : one.attributes.whole) append_raw(key, value);
  for (const double value : one.attributes.real) append_raw(key, value);
  append_raw(key, one.attributes.listed);
  for (const int64_t value : one.attributes.items()) append_raw(key, value);
  append_raw(key, one.place.has_value());
  append_raw(key, one.place.value_or(TensorPlacement::replicate()));
  for (const PlacedTensor& operand : operands) {
    append_raw(key, static_cast<int64_t>(operand.type.dtype));
    append_raw(key, operand.type.shape.size());
    for (const int64_t size : operand.type.shape) append_raw(key, size);
    append_raw(key, operand.placement);
  }
  return key;
}

/// Steps of AdamW and seeds change with every step of a run, and no plan follows from them.
Instruction without_numbers(Instruction one) {
  if (one.op == Op::kAdamw) one.attributes.whole[0] = 1;
  if (one.op == Op::kDropout) one.attributes.whole[0] = 0;
  if (one.op == Op::kRandn) one.attributes.whole[1] = 0;
  if (one.op != Op::kDropout) one.attributes.real = {};
  return one;
}

constexpr size_t kMostPlans = 65536;

}  // namespace

/// An instruction with the tensors that it reads.
struct Placer::Call {
  const Instruction& one;
  std::vector<PlacedTensor> operands;
};

TensorPlacement gradient_placement(const TensorPlacement& value) {
  return value.is_partial() ? TensorPlacement::replicate() : value;
}

void Placer::add_signal(const std::string& name, const std::vector<int64_t>& workers) {
  std::vector<int64_t> sorted = workers;
  std::ranges::sort(sorted);
  if (!is_signal_name(name) || std::ranges::find(signals_, name) != signals_.end())
    throw ConfigError("[plan.program] {}: '{}' is no name for another signal; use one word, once", at_, name);
  if (sorted.empty() || sorted.front() < 0 || std::ranges::adjacent_find(sorted) != sorted.end())
    throw ConfigError("[plan.program] {}: signal {} has workers {}; name each once, from 0 on", at_, name,
                      fmt::join(workers, ","));
  const auto found = std::ranges::find(groups_, workers);
  group_of_signal_.push_back(found - groups_.begin());
  if (found == groups_.end()) groups_.push_back(workers);
  signals_.push_back(name);
}

void Placer::add_dataset(const DatasetSpec& dataset) {
  const std::string fault = dataset_fault(dataset);
  if (!fault.empty()) throw ConfigError("[plan.program] {}: {}", at_, fault);
  if (datasets_.size() == kMostDatasets)
    throw ConfigError(
        "[plan.program] {}: the program has {} datasets, and no more may be; use one of them again", at_,
        datasets_.size());
  datasets_.push_back(dataset);
}

int64_t Placer::group_of(int32_t signal) const {
  TRIREME_CHECK(0 <= signal && signal < std::ssize(group_of_signal_), "[plan.program] there is no signal {}",
                signal);
  return group_of_signal_[static_cast<size_t>(signal)];
}

const PlacedTensor& Placer::tensor(uint32_t number) const {
  const auto found = tensors_.find(number);
  if (found == tensors_.end())
    throw ConfigError("[plan.program] {}: t{} is used before it is made, or after it was freed", at_, number);
  return found->second;
}

void Placer::fail(const Instruction& instruction, const std::string& what) const {
  throw ConfigError("[plan.program] {} '{}': {}", at_, to_text(instruction, signals_), what);
}

std::string Placer::lies_on(int64_t group) const {
  return fmt::format("{}", fmt::join(groups_[static_cast<size_t>(group)], " "));
}

std::vector<PlacedTensor> Placer::operands_of(const Instruction& instruction) const {
  std::vector<PlacedTensor> operands;
  for (size_t i = 0; i < instruction.inputs; ++i) {
    const auto found = tensors_.find(instruction.input[i]);
    if (found == tensors_.end())
      fail(instruction, fmt::format("t{} is used before it is made", instruction.input[i]));
    operands.push_back(found->second);
  }
  return operands;
}

/// The workers of the signal; without one, those of the first operand. All operands lie there.
int64_t Placer::group_for(const Call& call) const {
  const Instruction& one = call.one;
  const bool is_open = one.signal == Instruction::kNoSignal && call.operands.empty();
  if (is_open && groups_.size() == 1) return 0;
  if (is_open) fail(one, "nothing says on which workers; add the signal with '@'");
  const int64_t group =
      one.signal == Instruction::kNoSignal ? call.operands.front().group : group_of(one.signal);
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const PlacedTensor& operand = call.operands[i];
    if (operand.group == group) continue;
    const std::string made = operand.line > 0 ? fmt::format(", made at line {},", operand.line) : "";
    fail(one, fmt::format("t{}{} lies on workers {}, and this is done by workers {}; let it cross first",
                          one.input[i], made, lies_on(operand.group), lies_on(group)));
  }
  return group;
}

PlacedInstruction Placer::place(const Instruction& instruction) {
  const std::string fault = record_fault(instruction, signals_.size());
  if (!fault.empty()) throw ConfigError("[plan.program] {}: {}", at_, fault);
  PlacedInstruction placed = place_one({instruction, operands_of(instruction)});
  for (size_t i = 0; i < instruction.outputs; ++i) {
    if (tensors_.contains(instruction.output[i]))
      fail(instruction,
           fmt::format("t{} is made twice; give the second another number", instruction.output[i]));
  }
  follow(instruction, placed);
  return placed;
}

PlacedInstruction Placer::place_one(const Call& call) {
  const Instruction& one = call.one;
  const auto takes_one = [&](int64_t results) {
    if (one.inputs != 1 || one.outputs != results)
      fail(one, fmt::format("'{}' takes one tensor", instruction_word(one)));
    if (one.kind != InstructionKind::kFree && one.kind != InstructionKind::kFetch &&
        !is_floating(call.operands[0].type.dtype))
      fail(one, fmt::format("a tensor {} has no gradient; only floating ones have",
                            to_text(call.operands[0].type)));
  };
  PlacedInstruction placed;
  switch (one.kind) {
    case InstructionKind::kOp:
      return place_op(call);
    case InstructionKind::kInput:
      return place_input(call);
    case InstructionKind::kCross:
      return place_cross(call);
    case InstructionKind::kBatch:
      return place_batch(call);
    case InstructionKind::kFree:
    case InstructionKind::kFetch:
    case InstructionKind::kTrack:
      takes_one(0);
      placed.group = call.operands[0].group;
      break;
    case InstructionKind::kGradient: {
      takes_one(1);
      if (!call.operands[0].tracked) fail(one, "its gradient is not collected; write 'track' before its use");
      placed.group = group_for(call);
      const TensorPlacement lies = gradient_placement(call.operands[0].placement);
      placed.results = {{call.operands[0].type, placed.group, lies}};
      break;
    }
    case InstructionKind::kBackward:
      check_backward(call);
      placed.group = group_for(call);
      break;
    case InstructionKind::kWeights:
      if (one.inputs != 0 || one.outputs != 0 || one.attributes.whole[0] == 0)
        fail(one, "'weights' takes the number of a backward pass; write later=1");
      placed.group = group_for(call);
      break;
  }
  placed.operands = call.operands;
  return placed;
}

void Placer::check_backward(const Call& call) const {
  const Instruction& one = call.one;
  const size_t roots = one.inputs == 1 ? 1 : one.inputs / 2;
  if (one.outputs != 0 || roots == 0 || (one.inputs != 1 && one.inputs != 2 * roots))
    fail(one, "'backward' takes a scalar, or roots and behind them as many gradients");
  for (size_t root = 0; root < roots; ++root) {
    const PlacedTensor& tensor = call.operands[root];
    if (!is_floating(tensor.type.dtype))
      fail(one, fmt::format("a tensor {} has no gradient; only floating ones have", to_text(tensor.type)));
    if (one.inputs == 1 && checked_numel(tensor.type.shape) != 1)
      fail(one, fmt::format("a root without a gradient is a scalar, not {}; give its gradient",
                            to_text(tensor.type)));
    if (one.inputs > 1 && call.operands[roots + root].type != tensor.type)
      fail(one, fmt::format("the gradient of {} has another type", to_text(tensor.type)));
    if (!tensor.needs_grad)
      fail(one, fmt::format("no gradient passes from t{}: nothing that it was made of is tracked",
                            one.input[root]));
  }
}

PlacedInstruction Placer::place_input(const Call& call) const {
  const Instruction& one = call.one;
  if (one.inputs != 0 || one.outputs != 1) fail(one, "an input has no operands and one result");
  OpAttributes attributes = one.attributes;
  attributes.whole[1] = 0;
  TensorType type;
  try {
    type = factor_map(Op::kFull, {}, attributes).results[0];
  } catch (const ConfigError& error) {
    fail(one, error.what());
  }
  return placed_from_outside(call, type);
}

PlacedInstruction Placer::place_batch(const Call& call) const {
  const Instruction& one = call.one;
  const auto& [number, step, targets, none] = one.attributes.whole;
  if (one.inputs != 0 || one.outputs != 1) fail(one, "a batch has no operands and one result");
  if (number < 1 || number > std::ssize(datasets_))
    fail(one, fmt::format("there is no dataset {} among {}; declare it, and count from dataset=1", number,
                          datasets_.size()));
  if (targets != 0 && targets != 1) fail(one, fmt::format("targets is {}; give 1, or 0 for inputs", targets));
  const DatasetSpec& dataset = datasets_[static_cast<size_t>(number - 1)];
  const std::string fault = batch_fault(dataset, step);
  if (!fault.empty()) fail(one, fault);
  return placed_from_outside(call, dataset.type());
}

/// A tensor whose values are not of the program, placed as is asked for.
PlacedInstruction Placer::placed_from_outside(const Call& call, const TensorType& type) const {
  const Instruction& one = call.one;
  PlacedInstruction placed{.group = group_for(call)};
  placed.results = {{type, placed.group, one.place.value_or(TensorPlacement::replicate())}};
  const PlacedTensor& made = placed.results[0];
  if (made.placement.is_partial() ||
      (made.placement.is_shard() && made.placement.dim >= std::ssize(made.type.shape)))
    fail(one, fmt::format("'{}' {} cannot be placed {}; write place=R, or S with a dimension that it has",
                          instruction_word(one), to_text(made.type), to_text(made.placement)));
  return placed;
}

PlacedInstruction Placer::place_op(const Call& call) {
  const Instruction& one = call.one;
  PlacedInstruction placed{.group = group_for(call)};
  const auto ranks = std::ssize(groups_[static_cast<size_t>(placed.group)]);
  placed.op = planned(call, ranks);
  const std::vector<TensorType>& types = placed.op->map.results;
  if (one.outputs != types.size())
    fail(one, fmt::format("it has {} results, and names {}", types.size(), one.outputs));
  const bool passes = !one.no_grad && std::ranges::any_of(call.operands, &PlacedTensor::needs_grad);
  const std::vector<TensorPlacement> placements = placed.op->results();
  for (size_t i = 0; i < types.size(); ++i)
    placed.results.push_back({.type = types[i],
                              .group = placed.group,
                              .placement = placements[i],
                              .needs_grad = passes && is_floating(types[i].dtype)});
  placed.operands = call.operands;
  return placed;
}

std::shared_ptr<const OpPlan> Placer::planned(const Call& call, int64_t ranks) {
  const Instruction one = without_numbers(call.one);
  if (call.one.op == Op::kAdamw && call.one.attributes.whole[0] < 1)
    fail(call.one, fmt::format("step is {}; steps count from 1", call.one.attributes.whole[0]));
  const std::string key = plan_key(one, call.operands, ranks);
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  OpRequest request{.op = one.op, .attributes = one.attributes};
  for (const PlacedTensor& operand : call.operands) {
    request.types.push_back(operand.type);
    request.placements.push_back(operand.placement);
  }
  request.result = one.place;
  request.ranks = ranks;
  request.is_explicit = is_explicit_;
  try {
    auto plan = std::make_shared<const OpPlan>(plan_op(request));
    if (plans_.size() >= kMostPlans) plans_.clear();
    return plans_.emplace(key, std::move(plan)).first->second;
  } catch (const ConfigError& error) {
    fail(call.one, error.what());
  }
}

PlacedInstruction Placer::place_cross(const Call& call) const {
  const Instruction& one = call.one;
  if (one.inputs != 1 || one.outputs != 1)
    fail(one, fmt::format("a tensor crosses alone, but there are {}", one.inputs));
  if (one.signal == Instruction::kNoSignal) fail(one, "a tensor crosses to the workers of a signal; add '@'");
  const PlacedTensor& tensor = call.operands[0];
  const int64_t to = group_of(one.signal);
  PlacedInstruction placed{.group = to};
  const auto senders = std::ssize(groups_[static_cast<size_t>(tensor.group)]),
             receivers = std::ssize(groups_[static_cast<size_t>(to)]);
  PlacedCross& cross = placed.cross;
  cross.from = tensor.group;
  cross.to = to;
  const bool can_split = !tensor.type.shape.empty() && tensor.type.shape[0] >= senders;
  cross.sent = tensor.group == to            ? tensor.placement
               : senders != receivers        ? TensorPlacement::replicate()
               : tensor.placement.is_shard() ? tensor.placement
               : can_split                   ? TensorPlacement::shard(0)
                                             : TensorPlacement::replicate();
  const TensorPlacement unasked =
      tensor.group == to || !tensor.placement.is_partial() ? tensor.placement : TensorPlacement::replicate();
  const TensorPlacement lies =
      one.place.value_or(senders == receivers ? unasked : TensorPlacement::replicate());
  if (lies.is_partial() || (lies.is_shard() && lies.dim >= std::ssize(tensor.type.shape)))
    fail(one, fmt::format("a tensor {} cannot be placed {} where it arrives", to_text(tensor.type),
                          to_text(lies)));
  const int64_t copies = cross.sent.is_shard() ? 1 : receivers;
  cross.bytes = tensor.group == to ? 0 : copies * tensor.type.bytes();
  placed.results = {{.type = tensor.type, .group = to, .placement = lies}};
  placed.operands = call.operands;
  return placed;
}

void Placer::follow(const Instruction& instruction, const PlacedInstruction& placed) {
  if (instruction.kind == InstructionKind::kFree) {
    tensors_.erase(instruction.input[0]);
  } else if (instruction.kind == InstructionKind::kTrack) {
    PlacedTensor& tensor = tensors_.at(instruction.input[0]);
    tensor.tracked = tensor.needs_grad = true;
  }
  for (size_t i = 0; i < instruction.outputs; ++i) {
    PlacedTensor made = placed.results[i];
    made.line = instruction.line;
    tensors_.emplace(instruction.output[i], std::move(made));
  }
  Instruction meaning = instruction;
  meaning.line = 0;
  std::string bytes;
  append_raw(bytes, hash_);
  append_bytes(bytes, meaning);
  hash_ = xxh3(bytes);
}

}  // namespace trireme::plan
