#include "trireme/gt/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/gt/captured_step.h"

namespace gt {

using trireme::ConfigError;
using trireme::plan::Instruction;
using trireme::plan::InstructionKind;
using trireme::plan::Op;
using trireme::plan::OpAttributes;
using trireme::plan::PlacedInstruction;
using trireme::plan::Signal;
using trireme::plan::Signals;
using trireme::plan::TensorDtype;
using trireme::plan::TensorPlacement;
using trireme::plan::TensorType;

namespace {

/// The program of this thread: a program is made by one. Workers that are static outlive what a thread owns,
/// but not a pointer.
Program*& slot() {
  thread_local Program* program = nullptr;
  return program;
}

/// Operations that make a tensor which is not on workers yet from another one of that kind.
bool is_deferrable(Op op) {
  return op == Op::kScale || op == Op::kShift || op == Op::kCast || op == Op::kNeg || op == Op::kAbs ||
         op == Op::kExp || op == Op::kSqrt || op == Op::kSquare;
}

/// Whether the result may be a view of the operand: on some placements it is, on others not.
bool may_share_memory(Op op) {
  return op >= Op::kTranspose && op <= Op::kSplit;
}

/// Products, which an autocast computes in few bits.
bool is_product(Op op) {
  return op == Op::kMatmul || op == Op::kLinear || op == Op::kAttention;
}

/// Exponents, and sums of many terms, which bf16 has too few bits for.
bool needs_fp32(Op op) {
  switch (op) {
    case Op::kExp:
    case Op::kLog:
    case Op::kRsqrt:
    case Op::kSum:
    case Op::kMean:
    case Op::kSoftmax:
    case Op::kLogSoftmax:
    case Op::kLayerNorm:
    case Op::kRmsNorm:
    case Op::kCrossEntropy:
    case Op::kMseLoss:
      return true;
    default:
      return false;
  }
}

bool takes_one_dtype(Op op) {
  return (op >= Op::kAdd && op <= Op::kGe) || op == Op::kWhere || op == Op::kCat;
}

/// The operands that an operation writes.
bool writes_operand(Op op, size_t index) {
  return trireme::plan::record_of(op).in_place && index != 1;
}

/// The operand that is a weight.
bool is_weight(Op op, size_t index) {
  return index == 1 && (op == Op::kMatmul || op == Op::kLinear || op == Op::kEmbedding);
}

Signal everybody(int64_t workers, bool auto_shard) {
  Signal signal{.name = "all"};
  signal.workers.resize(static_cast<size_t>(workers));
  std::iota(signal.workers.begin(), signal.workers.end(), 0);
  signal.placement = auto_shard ? TensorPlacement::shard(0) : TensorPlacement::replicate();
  signal.is_placed = true;
  return signal;
}

}  // namespace

std::string place_of(const std::source_location& where) {
  const std::string_view file = where.file_name();
  return fmt::format("{}:{}", file.substr(file.rfind('/') + 1), where.line());
}

Number::~Number() {
  if (const std::shared_ptr<Program> owner = program.lock()) owner->freed(number, stage);
}

std::shared_ptr<Piece> whole_of(std::shared_ptr<Piece> piece) {
  while (piece && piece->joined) piece = piece->joined;
  return piece;
}

Program::Program(std::shared_ptr<trireme::controller::ProgramRunner> runner,
                 const std::optional<Signals>& signals, bool is_explicit, bool auto_shard)
    : runner_(std::move(runner)), file_(signals), auto_shard_(auto_shard), placer_(is_explicit) {
  if (!file_) return;
  stages_ = std::ssize(file_->stages);
  if (file_->workers() > runner_->workers())
    throw ConfigError("[gt.signals] the file places tensors on {} workers, and {} are there; start as many",
                      file_->workers(), runner_->workers());
}

std::shared_ptr<Program> Program::current() {
  if (slot() == nullptr)
    throw ConfigError(
        "[gt] this thread has no workers; keep what gt::gpu_workers(8) or gt::connect() returns");
  return slot()->shared_from_this();
}

bool Program::exists() {
  return slot() != nullptr;
}

void Program::make_current(Program* program) {
  if (program != nullptr && slot() != nullptr)
    throw ConfigError("[gt] this thread has workers already; give those back first");
  slot() = program;
}

int32_t Program::add_signal(UsedSignal used) {
  for (size_t i = 0; i < signals_.size(); ++i) {
    if (signals_[i].signal.name == used.signal.name) return static_cast<int32_t>(i);
  }
  placer_.add_signal(used.signal.name, used.signal.workers);
  runner_->add_signal(used.signal.name, used.signal.workers);
  if (file_of_program_) file_of_program_->add_signal(used.signal.name, used.signal.workers);
  signals_.push_back(std::move(used));
  return static_cast<int32_t>(std::ssize(signals_) - 1);
}

int32_t Program::default_signal() {
  return add_signal({.signal = everybody(runner_->workers(), auto_shard_)});
}

int32_t Program::signal_named(const std::string& name) {
  for (size_t i = 0; i < signals_.size(); ++i) {
    if (signals_[i].signal.name == name) return static_cast<int32_t>(i);
  }
  std::vector<std::string> names;
  if (file_) {
    for (const auto& boundary : file_->boundaries) {
      names.push_back(boundary.name);
      if (boundary.name != name) continue;
      Signal signal = file_->stages[static_cast<size_t>(boundary.to)].all;
      signal.name = name;
      return add_signal({.signal = signal, .stage = boundary.from, .to_stage = boundary.to});
    }
    for (size_t stage = 0; stage < file_->stages.size(); ++stage) {
      for (const Signal* one :
           {&file_->stages[stage].all, &file_->stages[stage].column, &file_->stages[stage].row}) {
        names.push_back(one->name);
        if (one->name == name)
          return add_signal({.signal = *one,
                             .stage = static_cast<int64_t>(stage),
                             .is_product = one != &file_->stages[stage].all});
      }
    }
    for (const Signal* scope : file_->scopes()) {
      names.push_back(scope->name);
      if (scope->name != name) continue;
      Signal signal = *scope;
      if (signal.workers.empty()) signal.workers = everybody(runner_->workers(), false).workers;
      return add_signal({.signal = signal});
    }
  }
  const std::string near = trireme::nearest_name(name, names);
  throw ConfigError("[gt.signal] there is no signal '{}'{}", name,
                    !file_         ? "; name a file of signals by TRIREME_CONFIG or gt::Options"
                    : near.empty() ? "; see 'trireme plan signals FILE'"
                                   : fmt::format("; did you mean '{}'?", near));
}

int32_t Program::scope() const {
  return scopes_.empty() ? Instruction::kNoSignal : scopes_.back();
}

const std::vector<int64_t>& Program::workers_of(const Node& node) const {
  return placer_.groups()[static_cast<size_t>(placer_.tensor(node.number).group)];
}

NodePtr Program::new_node(const TensorType& type, int32_t signal) {
  auto node = std::make_shared<Node>();
  node->program = weak_from_this();
  node->type = type;
  node->number = next_++;
  node->signal = signal;
  if (signal != Instruction::kNoSignal) {
    const UsedSignal& used = this->signal(signal);
    node->stage = used.to_stage >= 0 ? used.to_stage : used.stage;
  }
  return node;
}

void Program::freed(uint32_t number, int64_t stage) {
  freed_.emplace_back(number, stage);
}

/// A digest is taken where somebody compares it.
void Program::send(const Instruction& one, const PlacedInstruction& placed, int64_t stage) {
  const uint64_t digest = capture_ != nullptr ? digest_of(placed) : 0;
  if (recording_ != nullptr) {
    recording_->push_back({one, digest, stage});
  } else {
    give(one, digest);
  }
}

void Program::give(const Instruction& one, uint64_t placed) {
  if (file_of_program_) file_of_program_->write(one, placer_.signals());
  if (capture_ != nullptr) {
    capture_->take(one, placed);
  } else {
    runner_->submit(one);
  }
}

/// Frees go before the next instruction: a handle may end anywhere. By number, since the order in which
/// handles end is not that of a program on another rank.
void Program::send_frees() {
  std::ranges::sort(freed_);
  for (const auto& [number, stage] : std::exchange(freed_, {})) {
    Instruction one{.kind = InstructionKind::kFree, .inputs = 1};
    one.input[0] = number;
    send(one, placer_.place(one), stage);
  }
}

PlacedInstruction Program::emit(Instruction one, int64_t stage, const std::source_location& where) {
  send_frees();
  one.line = where.line();
  const std::string place = place_of(where);
  placer_.set_place(place);
  try {
    PlacedInstruction placed = placer_.place(one);
    if (log_)
      log_->write(place, to_text(one, placer_.signals()), placed,
                  placer_.groups()[static_cast<size_t>(placed.group)]);
    send(one, placed, stage);
    return placed;
  } catch (const trireme::Error& error) {
    if (log_) log_->error(error.what());
    throw;
  }
}

void Program::flush() {
  send_frees();
  runner_->flush();
}

void Program::write_to(const std::string& path) {
  file_of_program_ = std::make_unique<ProgramFile>(path);
  for (const UsedSignal& used : signals_) file_of_program_->add_signal(used.signal.name, used.signal.workers);
  for (const auto& dataset : placer_.datasets()) file_of_program_->add_dataset(dataset);
}

void Program::record(std::vector<Recorded>* into) {
  send_frees();
  if (kept_for() == 0) ++kept_for_;
  recording_ = into;
}

void Program::submit(const std::vector<Recorded>& instructions) {
  for (const Recorded& one : instructions) give(one.instruction, one.placed);
}

void Program::capture(CapturedStep* into) {
  if (is_recording())
    throw ConfigError(
        "[gt.capture] a schedule is under way; capture the step that has the schedule in it, not a part "
        "of its micro-batches");
  if (into != nullptr && capture_ != nullptr)
    throw ConfigError("[gt.capture] a gt::Capture was called inside of another one; remove one of the two");
  if (into != nullptr) ++kept_for_;
  send_frees();  // each belongs to the side on which its tensor was let go
  capture_ = into;
}

std::optional<uint32_t> Program::next_step() {
  if (free_steps_.empty() && next_step_ == trireme::plan::kMostRecordedSteps) return std::nullopt;
  if (free_steps_.empty()) return next_step_++;
  const uint32_t number = free_steps_.back();
  free_steps_.pop_back();
  return number;
}

/// A weight lies as the signal of its first product says; values from outside lie as activations do; the rest
/// is on every worker.
std::optional<TensorPlacement> Program::place_of_operand(const Node& node, Op op, size_t index,
                                                         int32_t signal) const {
  const auto whole = TensorPlacement::replicate();
  if (signal == Instruction::kNoSignal) return whole;
  const Signal& says = this->signal(signal).signal;
  const auto workers = std::ssize(says.workers);
  if (workers == 1 || !says.placement.is_shard()) return whole;
  const bool from_outside = node.pending.front().kind != InstructionKind::kOp && !node.requires_grad;
  int64_t dim = says.placement.dim;
  if (is_weight(op, index) && node.type.shape.size() == 2) {
    if (op == Op::kLinear) dim = 1 - dim;  // (out, in)
  } else if (!from_outside || dim != 0) {
    return whole;
  }
  const bool fits =
      0 <= dim && dim < std::ssize(node.type.shape) && node.type.shape[static_cast<size_t>(dim)] >= workers;
  return fits ? TensorPlacement::shard(dim) : whole;
}

/// Activations of a scope whose axis is 0 are split by rows; others lie as is cheapest.
std::optional<TensorPlacement> Program::place_of_result(const TensorType& type, int32_t signal) const {
  if (signal == Instruction::kNoSignal) return std::nullopt;
  const Signal& says = this->signal(signal).signal;
  const auto workers = std::ssize(says.workers);
  if (workers == 1) return std::nullopt;
  if (says.placement.is_replicate()) return says.placement;
  const bool rows = says.placement.dim == 0 && !type.shape.empty() && type.shape[0] >= workers;
  return rows ? std::optional(TensorPlacement::shard(0)) : std::nullopt;
}

void Program::make_at(const NodePtr& tensor, int32_t signal, std::optional<TensorPlacement> place,
                      const std::source_location& where) {
  if (tensor->made()) return;
  const UsedSignal& used = this->signal(signal);
  tensor->signal = signal;
  tensor->stage = used.to_stage >= 0 ? used.to_stage : used.stage;
  std::vector<Instruction> steps = tensor->pending;
  for (size_t i = 0; i < steps.size(); ++i) {
    Instruction& step = steps[i];
    const bool is_last = i + 1 == steps.size();
    const uint32_t before = i == 0 ? 0 : steps[i - 1].output[0];
    step.signal = signal;
    step.place = place;
    step.no_grad = step.kind == InstructionKind::kOp;
    if (i > 0) step.input[0] = before;
    step.output[0] = is_last ? tensor->number : next_++;
    if (step.kind == InstructionKind::kInput) {
      step.attributes.whole[1] = next_outside_++;
      runner_->put(step.attributes.whole[1], used.signal.workers.front(), tensor->value);
    }
    emit(step, tensor->stage, where);
    if (i > 0) freed_.emplace_back(before, tensor->stage);
  }
  tensor->pending = {};
  tensor->value = {};
  tensor->begin();
  if (!tensor->requires_grad) return;
  Instruction track{.kind = InstructionKind::kTrack, .inputs = 1};
  track.input[0] = tensor->number;
  emit(track, tensor->stage, where);
}

void Program::make(const NodePtr& tensor, const std::source_location& where) {
  if (tensor->made()) return;
  const int32_t signal = scope() == Instruction::kNoSignal ? default_signal() : scope();
  make_at(tensor, signal, place_of_operand(*tensor, Op::kFull, 0, signal), where);
}

/// A tensor that nobody has placed yet, made of another one.
NodePtr Program::deferred(const NodePtr& input, Instruction step, const std::source_location& where) {
  step.line = where.line();
  NodePtr node = new_node(trireme::plan::factor_map(step.op, {input->type}, step.attributes).results[0],
                          Instruction::kNoSignal);
  node->pending = input->pending;
  node->value = input->value;
  step.inputs = step.outputs = 1;
  node->pending.push_back(step);
  return node;
}

/// A handle may live longer than the workers of its tensor.
void Program::check_own(const NodePtr& tensor) const {
  if (tensor->program.lock().get() != this)
    throw ConfigError(
        "[gt] this tensor belongs to workers that this thread had before; make it again with these");
}

void Program::check_written(Op op, const std::vector<NodePtr>& inputs,
                            const std::source_location& where) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (writes_operand(op, i) && inputs[i]->memory.use_count() > 1)
      throw ConfigError(
          "[gt] {}: {} would write a tensor whose memory another one shares, which was reshaped, sliced, "
          "transposed or crossed from it, or it from that; write to a copy (x + 0), or let the other go, "
          "which a gt::recompute does in "
          "backward()",
          place_of(where), op);
  }
  const bool adds = op == Op::kAddInto || op == Op::kCopyInto;
  const auto passes = [](const NodePtr& one) { return one->requires_grad || one->piece; };
  if (adds && grad_enabled && std::ranges::any_of(inputs, passes))
    throw ConfigError(
        "[gt] {}: no gradient passes {}, and its operands have some; write x = x + y, or do it in the "
        "scope of a gt::no_grad",
        place_of(where), op);
}

/// The tensor in another dtype, laid out as it is; gradients come back in its own.
NodePtr Program::cast(const NodePtr& tensor, TensorDtype dtype, const std::source_location& where) {
  if (tensor->type.dtype == dtype || !is_floating(tensor->type.dtype)) return tensor;
  Instruction one{.op = Op::kCast, .signal = tensor->signal, .inputs = 1, .outputs = 1};
  one.attributes = OpAttributes::of({static_cast<int64_t>(dtype)});
  one.no_grad = !passes_now();
  const TensorPlacement lies = placer_.tensor(tensor->number).placement;
  if (!lies.is_partial()) one.place = lies;
  const NodePtr result = new_node({tensor->type.shape, dtype}, tensor->signal);
  one.input[0] = tensor->number;
  one.output[0] = result->number;
  emit(one, result->stage, where);
  result->begin();
  note_for_backward(one, {tensor}, {result}, where);
  if (passes_now()) join_pieces({tensor}, {result});
  return result;
}

/// The operands as an autocast converts them; they are on workers.
std::vector<NodePtr> Program::cast_operands(Op op, std::vector<NodePtr> inputs,
                                            const std::source_location& where) {
  std::optional<TensorDtype> dtype;
  if (is_product(op)) dtype = autocast;
  if (needs_fp32(op)) dtype = TensorDtype::kFp32;
  if (takes_one_dtype(op)) {
    const auto is_wide = [](const NodePtr& one) { return one->type.dtype == TensorDtype::kFp32; };
    if (std::ranges::any_of(inputs, is_wide)) dtype = TensorDtype::kFp32;
  }
  if (!dtype) return inputs;
  for (NodePtr& input : inputs) input = cast(input, *dtype, where);
  return inputs;
}

std::vector<NodePtr> Program::op(Op op, const std::vector<NodePtr>& given, const OpAttributes& attributes,
                                 const std::source_location& where) {
  std::vector<NodePtr> inputs = given;
  Instruction one{.op = op, .signal = scope()};
  one.attributes = attributes;
  one.no_grad = !passes_now();
  const bool in_place = trireme::plan::record_of(op).in_place;
  if (in_place) refuse_in_recompute("writes a tensor", where);
  for (const NodePtr& input : inputs) {
    check_own(input);
    check_outside(input, where);
  }
  if (inputs.size() > one.input.size())
    throw ConfigError("[gt] {}: {} tensors for {}; it takes up to {}, so do it in several", place_of(where),
                      inputs.size(), op, one.input.size());
  if (inputs.empty()) {
    NodePtr node = new_node(trireme::plan::factor_map(op, {}, attributes).results[0], Instruction::kNoSignal);
    one.outputs = 1;
    one.signal = Instruction::kNoSignal;
    node->pending = {one};
    return {node};
  }
  if (inputs.size() == 1 && !inputs[0]->made() && is_deferrable(op) && !inputs[0]->requires_grad)
    return {deferred(inputs[0], one, where)};
  if (in_place && !inputs[0]->made()) make(inputs[0], where);
  if (in_place) one.signal = Instruction::kNoSignal;
  // Without a scope it is done where the first operand lies that is on workers.
  int32_t signal = one.signal;
  for (const NodePtr& input : inputs) {
    if (signal == Instruction::kNoSignal && input->made()) signal = input->signal;
  }
  if (signal == Instruction::kNoSignal) signal = default_signal();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i]->made()) make_at(inputs[i], signal, place_of_operand(*inputs[i], op, i, signal), where);
  }
  if (autocast && !in_place) inputs = cast_operands(op, std::move(inputs), where);
  for (size_t i = 0; i < inputs.size(); ++i) one.input[i] = inputs[i]->number;
  one.inputs = static_cast<uint16_t>(inputs.size());
  if (one.signal == Instruction::kNoSignal && !in_place) one.signal = signal;
  check_written(op, inputs, where);
  std::vector<TensorType> types;
  for (const NodePtr& input : inputs) types.push_back(input->type);
  std::vector<NodePtr> results;
  try {
    for (const TensorType& type : trireme::plan::factor_map(op, types, attributes).results)
      results.push_back(new_node(type, one.signal));
  } catch (const ConfigError& error) {
    throw ConfigError("{} at {}", error.what(), place_of(where));
  }
  for (size_t i = 0; i < results.size(); ++i) one.output[i] = results[i]->number;
  one.outputs = static_cast<uint16_t>(results.size());
  if (results.size() == 1 && scope() != Instruction::kNoSignal)
    one.place = place_of_result(results[0]->type, one.signal);
  const int64_t stage = in_place ? inputs[0]->stage : results[0]->stage;
  emit(one, stage, where);
  for (size_t i = 0; i < inputs.size(); ++i)
    if (writes_operand(op, i)) ++inputs[i]->writes;
  for (const NodePtr& result : results) {
    result->begin();
    if (may_share_memory(op)) result->memory = inputs[0]->memory;
  }
  note_for_backward(one, inputs, results, where);
  if (!one.no_grad && !in_place) join_pieces(inputs, results);
  return results;
}

}  // namespace gt
