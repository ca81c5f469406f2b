#include "trireme/nn/layers.h"

namespace trireme::nn {

Linear::Linear(int64_t in, int64_t out, bool with_bias, WeightLayout layout)
    : in_(in), out_(out), layout_(layout) {
  const bool in_out = layout == WeightLayout::kInOut;
  weight = register_parameter("weight", at::empty({in_out ? in : out, in_out ? out : in}, at::kFloat));
  if (with_bias) bias = register_parameter("bias", at::empty({out}, at::kFloat));
}

void Linear::add_adapter(int64_t rank, double scale, double dropout) {
  adapter_in_ = register_module("lora_A", std::make_shared<Linear>(in_, rank, false));
  adapter_out_ = register_module("lora_B", std::make_shared<Linear>(rank, out_, false));
  adapter_scale_ = scale;
  adapter_dropout_ = dropout;
}

at::Tensor Linear::adapted(const at::Tensor& x, const at::Tensor& residual, Output output) const {
  if (!has_adapter()) return residual;
  const bool drops = adapter_dropout_ > 0.0 && is_training();
  const at::Tensor seen = drops ? at::dropout(x, adapter_dropout_, true) : x;
  return adapter_out_->forward(adapter_in_->forward(seen) * adapter_scale_, residual, {}, output);
}

at::Tensor Linear::forward(const at::Tensor& x, const at::Tensor& residual,
                           const std::optional<Fp8Recipe>& fp8, Output output, const Joints& joints) const {
  return linear(x, weight, bias, layout_, adapted(x, residual, output), fp8, output, joints);
}

at::Tensor linear_group(const at::Tensor& x, const std::vector<const Linear*>& layers,
                        const std::optional<Fp8Recipe>& fp8, const JointPtr& before) {
  std::vector<at::Tensor> weights, added;
  bool is_adapted = false;
  for (const Linear* layer : layers) {
    weights.push_back(layer->weight);
    is_adapted = is_adapted || layer->has_adapter();
  }
  if (!is_adapted) return linear_group(x, weights, fp8, before);
  for (const Linear* layer : layers) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = layer->weight.size(0);
    added.push_back(layer->has_adapter() ? layer->adapted(x) : at::zeros(shape, x.options()));
  }
  const at::Tensor all = at::cat(added, -1);
  added.clear();  // nothing keeps them for backward
  return linear_group(x, weights, fp8, before, all);
}

Embedding::Embedding(int64_t rows, int64_t width) {
  weight = register_parameter("weight", at::empty({rows, width}, at::kFloat));
}

at::Tensor Embedding::forward(const at::Tensor& indices, const JointPtr& joint) const {
  return nn::embedding(indices, weight, joint);
}

LayerNorm::LayerNorm(int64_t width, double eps) : eps_(eps) {
  weight = register_parameter("weight", at::empty({width}, at::kFloat));
  bias = register_parameter("bias", at::empty({width}, at::kFloat));
}

RmsNorm::RmsNorm(int64_t width, double eps) : eps_(eps) {
  weight = register_parameter("weight", at::empty({width}, at::kFloat));
}

}  // namespace trireme::nn
