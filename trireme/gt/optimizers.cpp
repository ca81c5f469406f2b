// Optimizers of programs, and what is done to gradients before them.
#include <map>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/gt/nn.h"
#include "trireme/gt/program.h"

namespace gt {

using trireme::plan::Op;
using trireme::plan::OpAttributes;

Optimizer::Optimizer(std::vector<Tensor> parameters, double rate, std::vector<std::string> kinds)
    : lr(rate), kinds_(std::move(kinds)) {
  for (Tensor& one : parameters) states_.push_back({.parameter = std::move(one)});
}

void Optimizer::step(source_location where) {
  for (State& state : states_) {
    const Tensor gradient = state.parameter.grad(where);
    if (gradient.defined()) update(state, gradient, where);
  }
}

/// Moments begin with the first gradient; those of a file lie where the parameter does from here on.
void Optimizer::update(State& state, const Tensor& gradient, const source_location& where) {
  const std::shared_ptr<Program> program = Program::current();
  while (state.moments.size() < kinds_.size()) state.moments.push_back(zeros_like(state.parameter, where));
  std::vector<NodePtr> nodes = {state.parameter.node(), gradient.node()};
  for (const Tensor& moment : state.moments) {
    program->make_beside(moment.node(), state.parameter.node(), where);
    nodes.push_back(moment.node());
  }
  const auto [op, attributes] = rule(++state.steps);
  program->op(op, nodes, attributes, where);
}

void Optimizer::zero_grad(source_location where) {
  for (const State& state : states_) state.parameter.zero_grad(where);
}

SGD::SGD(std::vector<Tensor> parameters, double rate, double momentum, double weight_decay)
    : Optimizer(std::move(parameters), rate,
                momentum == 0 ? std::vector<std::string>() : std::vector<std::string>{"momentum_buffer"}),
      momentum_(momentum),
      weight_decay_(weight_decay) {}

std::pair<Op, OpAttributes> SGD::rule(int64_t) const {
  return {Op::kSgd, OpAttributes::of({}, {lr, momentum_, weight_decay_})};
}

AdamW::AdamW(std::vector<Tensor> parameters, double rate, double beta1, double beta2, double eps,
             double weight_decay)
    : Optimizer(std::move(parameters), rate, {"exp_avg", "exp_avg_sq"}),
      beta1_(beta1),
      beta2_(beta2),
      eps_(eps),
      weight_decay_(weight_decay) {}

std::pair<Op, OpAttributes> AdamW::rule(int64_t steps) const {
  return {Op::kAdamw, OpAttributes::of({steps}, {lr, beta1_, beta2_, eps_, weight_decay_})};
}

/// Sums are taken where gradients lie, one for each list of workers; they meet on the first list, and what
/// comes of them goes back.
Tensor clip_grad_norm(const std::vector<Tensor>& parameters, double most, source_location where) {
  const std::shared_ptr<Program> program = Program::current();
  const Program::Aside without_grad(*program, false);
  struct Part {
    Tensor sum;
    int32_t signal = 0;
    std::vector<Tensor> gradients = {};
  };
  std::map<std::vector<int64_t>, Part> parts;
  for (const Tensor& one : parameters) {
    const Tensor gradient = one.grad(where);
    if (!gradient.defined()) continue;
    Part& part = parts[program->workers_of(*gradient.node())];
    const Tensor sum = square(gradient.to(Dtype::kFp32, where), where).sum({}, false, where);
    part.sum = part.sum.defined() ? Operand(part.sum, where) + sum : sum;
    part.signal = one.node()->signal;
    part.gradients.push_back(gradient);
  }
  if (parts.empty()) throw trireme::ConfigError("[gt] there is no gradient to clip; run backward() before");
  const int32_t home = parts.begin()->second.signal;
  Tensor all;
  for (auto& [workers, part] : parts) {
    const Tensor here(
        program->cross(part.sum.node(), home, where, trireme::plan::TensorPlacement::replicate()));
    all = all.defined() ? Operand(all, where) + here : here;
  }
  const Tensor norm = sqrt(all, where);
  const Tensor ones = Tensor(program->alike(norm.node(), 1, where));
  const Tensor scale =
      minimum(ones, Operand(Operand(ones, where) * most, where) / (Operand(norm, where) + 1e-6), where);
  for (auto& [workers, part] : parts) {
    const Tensor here(
        program->cross(scale.node(), part.signal, where, trireme::plan::TensorPlacement::replicate()));
    for (Tensor& gradient : part.gradients)
      gradient.copy_((Operand(gradient.to(Dtype::kFp32, where), where) * here).to(gradient.dtype(), where),
                     where);
  }
  return norm;
}

}  // namespace gt
