#include "trireme/nn/layers.h"

namespace trireme::nn {

Linear::Linear(int64_t in, int64_t out, bool with_bias, WeightLayout layout) : layout_(layout) {
  const bool in_out = layout == WeightLayout::kInOut;
  weight = register_parameter("weight", at::empty({in_out ? in : out, in_out ? out : in}, at::kFloat));
  if (with_bias) bias = register_parameter("bias", at::empty({out}, at::kFloat));
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
