#include "trireme/gt/nn.h"

namespace gt {

namespace {

Tensor parameter(Tensor one) {
  one.requires_grad_();
  return one;
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

}  // namespace gt
