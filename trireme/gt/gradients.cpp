// Gradients of a program. Workers differentiate what lies between two crossings; the client knows which
// tensors crossed, and so in which order the passes go back.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/gt/program.h"

namespace gt {

using trireme::ConfigError;
using trireme::plan::Instruction;
using trireme::plan::InstructionKind;
using trireme::plan::kMostOpInputs;
using trireme::plan::Op;
using trireme::plan::TensorPlacement;

bool passes_gradients(const Node& node) {
  return node.requires_grad || node.piece != nullptr;
}

namespace {

/// Pieces from which gradients come to `piece`, and itself, in the order in which they go back.
class BackwardOrder {
 public:
  explicit BackwardOrder(const std::shared_ptr<Piece>& loss) {
    visit(loss);
    std::ranges::reverse(order_);
  }
  const std::vector<std::shared_ptr<Piece>>& pieces() const { return order_; }

 private:
  void visit(const std::shared_ptr<Piece>& piece) {
    if (done_.contains(piece.get())) return;
    if (!open_.insert(piece.get()).second)
      throw ConfigError(
          "[gt.backward] a tensor came back to workers and met one that never left: gradients would pass "
          "them "
          "twice; let that one pass gt::here() in the scope of the later stage, too");
    if (piece->done)
      throw ConfigError(
          "[gt.backward] gradients went back through this once, or through something that it was added to; "
          "compute it again before, and add losses up for a log in the scope of a gt::no_grad");
    for (const Crossing& entry : piece->entries) {
      if (entry.again && open_.contains(whole_of(entry.from).get()))
        throw ConfigError(
            "[gt.backward] what went into a gt::recompute met what came out of it: gradients would pass "
            "twice; "
            "compute what both go into, such as their sum, inside of it");
      visit(whole_of(entry.from));
    }
    open_.erase(piece.get());
    done_.insert(piece.get());
    order_.push_back(piece);
  }

  std::set<const Piece*> open_, done_;
  std::vector<std::shared_ptr<Piece>> order_;
};

}  // namespace

struct Program::Roots {
  std::vector<NodePtr> tensors, gradients;
  std::vector<std::pair<std::shared_ptr<Recomputed>, NodePtr>> again = {};  ///< with gradients of results
};

void Program::require_grad(const NodePtr& tensor) {
  check_own(tensor);
  if (!is_floating(tensor->type.dtype))
    throw ConfigError("[gt] a tensor {} has no gradient; only floating ones have", to_text(tensor->type));
  if (tensor->piece)
    throw ConfigError("[gt] this tensor was computed from others that require gradients; only a leaf may");
  if (recomputed_ != nullptr && recomputed_->made.contains(tensor->number))
    throw ConfigError(
        "[gt.recompute] a tensor that was computed inside of a gt::recompute cannot collect a gradient; make "
        "it "
        "outside");
  if (std::exchange(tensor->requires_grad, true) || !tensor->made()) return;
  Instruction track{.kind = InstructionKind::kTrack, .inputs = 1};
  track.input[0] = tensor->number;
  emit(track, tensor->stage, std::source_location::current());
}

/// Results belong to one piece with all operands that depend on something: their graphs are one. Parameters
/// join nothing, since every micro-batch uses them.
void Program::join_pieces(const std::vector<NodePtr>& inputs, const std::vector<NodePtr>& results) {
  std::shared_ptr<Piece> piece;
  for (const NodePtr& input : inputs) {
    const std::shared_ptr<Piece> other = whole_of(input->piece);
    if (!other || other == piece) continue;
    if (piece) {
      std::ranges::move(piece->entries, std::back_inserter(other->entries));
      std::ranges::move(piece->leaves, std::back_inserter(other->leaves));
      other->done = other->done || piece->done;
      piece->entries.clear();
      piece->leaves.clear();
      piece->joined = other;
    }
    piece = other;
  }
  for (const NodePtr& input : inputs) {
    if (!input->requires_grad) continue;
    if (!piece) piece = std::make_shared<Piece>();
    if (std::ranges::find(piece->leaves, input) == piece->leaves.end()) piece->leaves.push_back(input);
  }
  for (const NodePtr& result : results) {
    if (piece && is_floating(result->type.dtype)) result->piece = piece;
  }
}

NodePtr Program::cross(const NodePtr& tensor, int32_t signal, const std::source_location& where,
                       std::optional<TensorPlacement> place) {
  check_own(tensor);
  refuse_in_recompute("takes a tensor to other workers", where);
  check_outside(tensor, where);
  if (!tensor->made()) {
    make_at(tensor, signal, place_of_operand(*tensor, Op::kFull, 0, signal), where);
    return tensor;
  }
  Instruction one{.kind = InstructionKind::kCross, .signal = signal, .inputs = 1, .outputs = 1};
  NodePtr result = new_node(tensor->type, signal);
  one.input[0] = tensor->number;
  one.output[0] = result->number;
  one.place = place ? place : place_of_result(tensor->type, signal);
  emit(one, tensor->stage, where);
  result->begin();
  const bool stays = placer_.tensor(one.input[0]).group == placer_.tensor(one.output[0]).group;
  if (stays) result->memory = tensor->memory;  // nothing is copied
  if (!grad_enabled || !passes_gradients(*tensor)) return result;
  // The result is a leaf of its workers' graph, and what it collects goes back.
  Instruction track{.kind = InstructionKind::kTrack, .inputs = 1};
  track.input[0] = result->number;
  emit(track, result->stage, where);
  result->piece = std::make_shared<Piece>();
  const std::shared_ptr<Piece> from = tensor->piece ? tensor->piece : std::make_shared<Piece>();
  if (tensor->requires_grad) from->leaves.push_back(tensor);
  result->piece->entries = {{tensor, from, result->life, signal}};
  return result;
}

/// The signal by which a gradient goes the way back: B_to_A for a tensor that came by A_to_B.
int32_t Program::signal_back(const Crossing& crossing) {
  const UsedSignal used = signal(crossing.signal);
  const std::string name = used.signal.name;
  const size_t to = name.find("_to_");
  if (to == std::string::npos) return crossing.source->signal;
  UsedSignal back{.signal = signal(crossing.source->signal).signal};
  back.signal.name = name.substr(to + 4) + "_to_" + name.substr(0, to);
  back.stage = used.to_stage;
  back.to_stage = used.stage;
  // A tensor may have come by a boundary of other stages than its own.
  const int32_t number = add_signal(back);
  return signal(number).signal.workers == back.signal.workers ? number : crossing.source->signal;
}

NodePtr Program::take_gradient(uint32_t number, const NodePtr& as, int64_t stage, int32_t signal,
                               const std::source_location& where) {
  NodePtr gradient = new_node(as->type, signal);
  gradient->stage = stage;
  Instruction one{.kind = InstructionKind::kGradient, .inputs = 1, .outputs = 1};
  one.input[0] = number;
  one.output[0] = gradient->number;
  emit(one, stage, where);
  gradient->begin();
  return gradient;
}

/// More roots than an instruction has operands become one: the sum of products with their gradients, whose
/// gradients these are.
void Program::run_backward(const Roots& roots, const std::source_location& where) {
  const size_t count = roots.tensors.size();
  Instruction one{.kind = InstructionKind::kBackward};
  if (2 * count > static_cast<size_t>(kMostOpInputs)) {
    const Aside with_grad(*this, true);
    NodePtr sum;
    for (size_t i = 0; i < count; ++i) {
      const NodePtr product = op(Op::kMul, {roots.tensors[i], roots.gradients[i]}, {}, where)[0];
      const NodePtr term = op(Op::kSum, {product}, {}, where)[0];
      sum = sum ? op(Op::kAdd, {sum, term}, {}, where)[0] : term;
    }
    return run_backward({{sum}, {}}, where);
  }
  one.signal = roots.tensors.front()->signal;
  for (const NodePtr& tensor : roots.tensors) one.input[one.inputs++] = tensor->number;
  for (const NodePtr& gradient : roots.gradients) one.input[one.inputs++] = gradient->number;
  emit(one, roots.tensors.front()->stage, where);
}

/// Differentiates a piece. Its roots are free behind it.
void Program::go_back(Roots roots, const std::source_location& where) {
  for (const auto& [recomputed, gradient] : roots.again) {
    roots.tensors.push_back(done_again(*recomputed));
    roots.gradients.push_back(gradient);
  }
  run_backward(roots, where);
}

void Program::backward(const NodePtr& loss, const std::source_location& where) {
  check_own(loss);
  check_outside(loss, where);
  refuse_in_recompute("differentiates", where);
  const std::shared_ptr<Piece> last = whole_of(loss->piece);
  if (!last)
    throw ConfigError(
        "[gt.backward] nothing that this tensor was made of requires gradients; call requires_grad_() "
        "on parameters before their first use");
  const BackwardOrder order(last);
  for (const std::shared_ptr<Piece>& piece : order.pieces()) {
    for (const Crossing& entry : piece->entries)
      if (entry.again) check_unwritten(*entry.again, where);
  }
  const Aside without_grad(*this, false);
  std::map<const Piece*, Roots> roots;
  roots[last.get()].tensors = {loss};
  for (const std::shared_ptr<Piece>& piece : order.pieces()) {
    go_back(std::exchange(roots[piece.get()], {}), where);
    for (const Crossing& entry : std::exchange(piece->entries, {})) {
      const NodePtr here =
          take_gradient(entry.result->number, entry.source, entry.result->stage, entry.signal, where);
      Roots& of_source = roots[whole_of(entry.from).get()];
      if (entry.again) {
        of_source.again.emplace_back(entry.again, here);
        continue;
      }
      const NodePtr back = cross(here, signal_back(entry), where,
                                 gradient_placement(placer_.tensor(entry.source->number).placement));
      of_source.tensors.push_back(entry.source);
      of_source.gradients.push_back(back);
    }
    for (const NodePtr& leaf : std::exchange(piece->leaves, {})) leaf->has_collected = true;
    piece->done = true;
  }
}

NodePtr Program::gradient(const NodePtr& tensor, const std::source_location& where) {
  check_own(tensor);
  if (!tensor->requires_grad)
    throw ConfigError("[gt] this tensor collects no gradient; call requires_grad_() before its first use");
  if (!std::exchange(tensor->has_collected, false)) return tensor->grad;
  const NodePtr fresh = take_gradient(tensor->number, tensor, tensor->stage, tensor->signal, where);
  const Aside without_grad(*this, false);
  tensor->grad = tensor->grad ? op(Op::kAdd, {tensor->grad, fresh}, {}, where)[0] : fresh;
  return tensor->grad;
}

void Program::forget_gradient(const NodePtr& tensor, const std::source_location& where) {
  gradient(tensor, where);
  tensor->grad = {};
}

}  // namespace gt
