#include "trireme/gt/nn.h"

#include <map>

#include "trireme/base/error.h"
#include "trireme/gt/program.h"

namespace gt {

using trireme::plan::Op;
using trireme::plan::OpAttributes;

namespace {

Tensor parameter(Tensor one) {
  one.requires_grad_();
  return one;
}

/// An operation that writes its first operand.
void update(Op op, const std::vector<Tensor>& tensors, const OpAttributes& attributes,
            const source_location& where) {
  std::vector<NodePtr> nodes;
  for (const Tensor& one : tensors) nodes.push_back(one.node());
  Program::current()->op(op, nodes, attributes, where);
}

}  // namespace

namespace nn {

Linear::Linear(int64_t in, int64_t out, bool with_bias, double std)
    : weight(parameter(randn({in, out}) * std)), bias(with_bias ? parameter(zeros({out})) : Tensor()) {}

Tensor Linear::operator()(const Tensor& x, source_location where) const {
  const Tensor product = matmul(x, weight, where);
  return bias.defined() ? Operand(product, where) + bias : product;
}

NamedTensors Linear::parameters(const std::string& name) const {
  NamedTensors all = {{name + ".weight", weight}};
  if (bias.defined()) all.emplace_back(name + ".bias", bias);
  return all;
}

Embedding::Embedding(int64_t words, int64_t width, double std)
    : weight(parameter(randn({words, width}) * std)) {}

Tensor Embedding::operator()(const Tensor& words, source_location where) const {
  return functional::embedding(words, weight, where);
}

NamedTensors Embedding::parameters(const std::string& name) const {
  return {{name + ".weight", weight}};
}

LayerNorm::LayerNorm(int64_t width, double eps_of_it)
    : weight(parameter(ones({width}))), bias(parameter(zeros({width}))), eps(eps_of_it) {}

Tensor LayerNorm::operator()(const Tensor& x, source_location where) const {
  return functional::layer_norm(x, weight, bias, eps, where);
}

NamedTensors LayerNorm::parameters(const std::string& name) const {
  return {{name + ".weight", weight}, {name + ".bias", bias}};
}

}  // namespace nn

SGD::SGD(std::vector<Tensor> parameters, double rate, double momentum, double weight_decay)
    : lr(rate),
      parameters_(std::move(parameters)),
      momenta_(parameters_.size()),
      momentum_(momentum),
      weight_decay_(weight_decay) {}

void SGD::step(source_location where) {
  OpAttributes attributes;
  attributes.real = {lr, momentum_, weight_decay_};
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor gradient = parameters_[i].grad(where);
    if (!gradient.defined()) continue;
    std::vector<Tensor> tensors = {parameters_[i], gradient};
    if (momentum_ != 0) {
      if (!momenta_[i].defined()) momenta_[i] = zeros_like(parameters_[i], where);
      tensors.push_back(momenta_[i]);
    }
    update(Op::kSgd, tensors, attributes, where);
  }
}

void SGD::zero_grad(source_location where) {
  for (const Tensor& one : parameters_) one.zero_grad(where);
}

AdamW::AdamW(std::vector<Tensor> parameters, double rate, double beta1, double beta2, double eps,
             double weight_decay)
    : lr(rate), beta1_(beta1), beta2_(beta2), eps_(eps), weight_decay_(weight_decay) {
  for (Tensor& one : parameters) states_.push_back({.parameter = std::move(one)});
}

void AdamW::step(source_location where) {
  for (State& state : states_) {
    const Tensor gradient = state.parameter.grad(where);
    if (!gradient.defined()) continue;
    if (!state.mean.defined()) {
      state.mean = zeros_like(state.parameter, where);
      state.square = zeros_like(state.parameter, where);
    }
    OpAttributes attributes;
    attributes.whole[0] = ++state.steps;
    attributes.real = {lr, beta1_, beta2_, eps_, weight_decay_};
    update(Op::kAdamw, {state.parameter, gradient, state.mean, state.square}, attributes, where);
  }
}

void AdamW::zero_grad(source_location where) {
  for (const State& state : states_) state.parameter.zero_grad(where);
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
