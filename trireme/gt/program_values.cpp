// Values of a program's tensors: those that come from the client, and those that it asks for.
#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/gt/program.h"

namespace gt {

using trireme::ConfigError;
using trireme::plan::Instruction;
using trireme::plan::InstructionKind;
using trireme::plan::Op;
using trireme::plan::OpAttributes;
using trireme::plan::TensorType;

NodePtr Program::input(const TensorType& type, std::string bytes, const std::source_location& where) {
  Instruction one{.kind = InstructionKind::kInput, .line = where.line(), .outputs = 1};
  one.attributes.whole[0] = static_cast<int64_t>(type.dtype);
  one.attributes.set_items(type.shape);
  NodePtr node = new_node(type, Instruction::kNoSignal);
  if (static_cast<int64_t>(bytes.size()) != type.bytes())
    throw ConfigError("[gt] {}: {} bytes for a tensor {} of {} bytes; give a value for each element",
                      place_of(where), bytes.size(), to_text(type), type.bytes());
  node->pending = {one};
  node->value = std::move(bytes);
  return node;
}

int64_t Program::dataset(const trireme::plan::DatasetSpec& spec, const std::source_location& where) {
  const auto& known = placer_.datasets();
  const auto is_same = [&spec](trireme::plan::DatasetSpec one) {
    one.place = spec.place;
    return one == spec;
  };
  const auto found = std::ranges::find_if(known, is_same);
  if (found != known.end()) return found - known.begin() + 1;
  placer_.set_place(place_of(where));
  placer_.add_dataset(spec);
  runner_->add_dataset(spec);
  if (file_of_program_) file_of_program_->add_dataset(spec);
  return std::ssize(placer_.datasets());
}

NodePtr Program::batch(int64_t dataset, int64_t step, bool targets, const std::source_location& where) {
  const trireme::plan::DatasetSpec& spec = placer_.datasets().at(static_cast<size_t>(dataset - 1));
  const std::string fault = batch_fault(spec, step);
  if (!fault.empty()) throw ConfigError("[gt.dataset] {}: {}", place_of(where), fault);
  Instruction one{.kind = InstructionKind::kBatch, .line = where.line(), .outputs = 1};
  one.attributes = OpAttributes::of({dataset, step, targets ? 1 : 0});
  NodePtr node = new_node(spec.type(), Instruction::kNoSignal);
  node->pending = {one};
  return node;
}

NodePtr Program::alike(const NodePtr& tensor, double value, const std::source_location& where) {
  check_own(tensor);
  make(tensor, where);
  OpAttributes attributes;
  attributes.whole[0] = static_cast<int64_t>(tensor->type.dtype);
  attributes.real[0] = value;
  attributes.set_items(tensor->type.shape);
  Instruction one{.op = Op::kFull, .signal = tensor->signal, .outputs = 1};
  one.attributes = attributes;
  one.no_grad = true;
  one.place = gradient_placement(placer_.tensor(tensor->number).placement);
  NodePtr node = new_node(tensor->type, tensor->signal);
  one.output[0] = node->number;
  emit(one, node->stage, where);
  node->begin();
  return node;
}

std::future<std::string> Program::fetch(const NodePtr& tensor, const std::source_location& where) {
  check_own(tensor);
  make(tensor, where);
  Instruction one{.kind = InstructionKind::kFetch, .inputs = 1};
  one.input[0] = tensor->number;
  trireme::controller::ProgramRunner::Asked asked =
      runner_->ask(workers_of(*tensor).front(), tensor->type.bytes());
  one.attributes.whole[0] = asked.number;
  emit(one, tensor->stage, where);
  if (recording_ == nullptr) runner_->flush();
  return std::move(asked.value);
}

void Program::make_beside(const NodePtr& tensor, const NodePtr& as, const std::source_location& where) {
  if (tensor->made()) return;
  make(as, where);
  make_at(tensor, as->signal, gradient_placement(placer_.tensor(as->number).placement), where);
  if (recording_ == nullptr) runner_->flush();  // a worker that has many values shall begin to use them
}

std::future<std::string> Program::peek(const NodePtr& tensor, const std::source_location& where) {
  if (tensor->made()) return fetch(tensor, where);
  const NodePtr copy = new_node(tensor->type, Instruction::kNoSignal);
  copy->pending = tensor->pending;
  copy->value = tensor->value;
  return fetch(copy, where);
}

void Program::check_assignable(const NodePtr& tensor, const std::source_location& where) {
  check_own(tensor);
  const Aside without_grad(*this, false);
  if (tensor->made()) check_written(Op::kCopyInto, {tensor}, where);
}

void Program::assign(const NodePtr& tensor, std::string bytes, const std::source_location& where) {
  check_assignable(tensor, where);
  const NodePtr source = input(tensor->type, std::move(bytes), where);
  const Aside without_grad(*this, false);
  if (tensor->made()) {
    make_beside(source, tensor, where);
    op(Op::kCopyInto, {tensor, source}, {}, where);
  } else {
    tensor->pending = std::move(source->pending);
    tensor->value = std::move(source->value);
  }
}

}  // namespace gt
