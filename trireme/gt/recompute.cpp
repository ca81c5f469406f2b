// Operations that are done again for a gradient. The client has their instructions, so workers know no more
// of it than of any other operation.
#include "trireme/gt/recompute.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/gt/program.h"

namespace gt {

using trireme::ConfigError;
using trireme::plan::Instruction;
using trireme::plan::InstructionKind;

void Program::refuse_in_recompute(std::string_view what, const std::source_location& where) const {
  if (recomputed_ == nullptr) return;
  throw ConfigError(
      "[gt.recompute] {}: an operation {} inside of gt::recompute, which would do so again; do it outside",
      place_of(where), what);
}

/// Notes an operation as backward will have it.
void Program::note_for_backward(const Instruction& one, const std::vector<NodePtr>& inputs,
                                const std::vector<NodePtr>& results, const std::source_location& where) {
  if (recomputed_ == nullptr) return;
  Recomputed::Done done{.instruction = one, .types = {}, .stage = results[0]->stage, .where = where};
  done.instruction.no_grad = !grad_enabled;
  bool passes = false;
  for (const NodePtr& input : inputs)
    passes = passes || passes_gradients(*input) || recomputed_->passing.contains(input->number);
  passes = passes && grad_enabled;
  for (const NodePtr& input : inputs) {
    if (recomputed_->made.contains(input->number)) continue;
    const auto known = std::ranges::find(recomputed_->given, input, &Recomputed::Given::tensor);
    if (known == recomputed_->given.end()) recomputed_->given.push_back({input, input->writes});
    if (passes) recomputed_->joined.push_back(input);
  }
  for (const NodePtr& result : results) {
    done.types.push_back(result->type);
    recomputed_->made.insert(result->number);
    result->is_inside = passes && is_floating(result->type.dtype);
    if (result->is_inside) recomputed_->passing.insert(result->number);
  }
  recomputed_->operations.push_back(std::move(done));
}

NodePtr Program::recompute(const std::function<NodePtr()>& body, const std::source_location& where) {
  if (!passes_now()) return body();
  const auto recomputed = std::make_shared<Recomputed>();
  NodePtr result;
  {
    struct Scope {
      Program& program;
      ~Scope() { program.recomputed_ = nullptr; }
    } const scope{*this};
    recomputed_ = recomputed.get();
    result = body();
  }
  check_own(result);
  recomputed->result = result->number;
  if (!recomputed->passing.contains(result->number)) return result;
  result->is_inside = false;
  // Behind it the graph begins anew; before it, it is one with what the operations would have joined.
  NodePtr again = new_node(result->type, result->signal);
  again->stage = result->stage;
  join_pieces(recomputed->joined, {again});
  Instruction track{.kind = InstructionKind::kTrack, .inputs = 1};
  track.attributes = trireme::plan::OpAttributes::of({1});
  track.input[0] = result->number;
  emit(track, result->stage, where);
  result->piece = std::make_shared<Piece>();
  result->piece->entries = {{again, again->piece, result->life, result->signal, recomputed}};
  return result;
}

/// Throws ConfigError where operations cannot be done again as they were.
void Program::check_unwritten(const Recomputed& recomputed, const std::source_location& where) {
  for (const Recomputed::Given& given : recomputed.given) {
    if (given.tensor->writes == given.writes) continue;
    throw ConfigError(
        "[gt.backward] {}: {} went into a gt::recompute, and was written before gradients came back; its "
        "operations cannot be done again with the values that they had, so write behind backward()",
        place_of(where), to_text(given.tensor->type));
  }
}

/// Throws ConfigError where a gradient would be lost: operations inside have none that passes.
void Program::check_outside(const NodePtr& tensor, const std::source_location& where) const {
  if (!tensor->is_inside || !passes_now()) return;
  throw ConfigError(
      "[gt.recompute] {}: a tensor that was computed inside of a gt::recompute is used outside, and "
      "gradients would not "
      "pass it; return it, compute it outside, or use its value in the scope of a gt::no_grad",
      place_of(where));
}

/// The result of the operations, made anew, with what its gradient needs.
NodePtr Program::done_again(const Recomputed& recomputed) {
  std::map<uint32_t, NodePtr> made;  // by the numbers of the first time
  for (const Recomputed::Done& done : recomputed.operations) {
    Instruction one = done.instruction;
    for (size_t i = 0; i < one.inputs; ++i)
      if (const auto found = made.find(one.input[i]); found != made.end())
        one.input[i] = found->second->number;
    std::vector<NodePtr> results;
    for (size_t i = 0; i < one.outputs; ++i) {
      NodePtr& result = results.emplace_back(new_node(done.types[i], one.signal));
      result->stage = done.stage;
      one.output[i] = result->number;
    }
    emit(one, done.stage, done.where);
    for (size_t i = 0; i < results.size(); ++i) {
      results[i]->begin();
      made[done.instruction.output[i]] = results[i];
    }
  }
  return made.at(recomputed.result);
}

Tensor recompute(const std::function<Tensor()>& body, source_location where) {
  Tensor result;
  const NodePtr node = Program::current()->recompute(
      [&] {
        result = body();
        if (!result.defined())
          throw ConfigError("[gt.recompute] {}: it returned an empty tensor", place_of(where));
        return result.node();
      },
      where);
  return Tensor(node);
}

}  // namespace gt
