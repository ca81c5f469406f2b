#include "trireme/nn/layers.h"

#include "trireme/nn/linear_parts.h"

namespace trireme::nn {

Linear::Linear(int64_t in, int64_t out, bool with_bias, WeightLayout layout)
    : in_(in), out_(out), layout_(layout) {
  const bool in_out = layout == WeightLayout::kInOut;
  weight = register_parameter("weight", at::empty({in_out ? in : out, in_out ? out : in}, at::kFloat));
  if (with_bias) bias = register_parameter("bias", at::empty({out}, at::kFloat));
}

void Linear::add_adapter(const LowRank& adapter) {
  adapter_ = adapter;
  adapter_in_ = register_module("lora_A", std::make_shared<Linear>(in_, adapter.rank, false));
  adapter_out_ = register_module("lora_B", std::make_shared<Linear>(adapter.rank, out_, false));
  if (adapter.lengths)
    magnitude_ = register_parameter("lora_magnitude_vector", at::empty({out_}, at::kFloat));
}

namespace {

/// `values` (..., out) of any dtype times `factors` (out) in fp32, in the dtype of `values`.
at::Tensor times_rows(const at::Tensor& values, const at::Tensor& factors) {
  return (values * factors).to(values.scalar_type());
}

/// Sums over the rows of two matrices' elementwise product, in fp32.
at::Tensor row_products(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kFloat) * b.to(at::kFloat)).sum(1);
}

at::Tensor plus(const at::Tensor& sum, const at::Tensor& addend) {
  return addend.defined() ? sum + addend : sum;
}

}  // namespace

/// A layer that makes features of all rows has its rows of B, and all of A, which each rank applies to rows
/// of its own; one that makes sums for a rank's rows the other way round.
at::Tensor Linear::low_rank(const at::Tensor& x, const at::Tensor& residual, Output output,
                            const Joints& joints) const {
  const Joints enters{.before = joints.before, .after = {}}, leaves{.before = {}, .after = joints.after};
  const at::Tensor thin = adapter_in_->forward(x, {}, {}, Output::kRead, leaves);
  return adapter_out_->forward(thin * adapter_.scale, residual, {}, output, enters);
}

/// The squares of |W + s B A| without that matrix: |W|^2 + 2 s (W A^T) B + s^2 B (A A^T) B, row by row. Ranks
/// that have some columns of W and A have terms of each of these sums.
at::Tensor Linear::length_ratio(const JointPtr& after) const {
  const auto lengths_of = [&](at::Tensor& plain, at::Tensor& adapted) {
    const at::NoGradGuard no_grad;
    const at::Tensor held = readable(weight), rows = layout_ == WeightLayout::kInOut ? held.t() : held;
    const at::Tensor &a = adapter_in_->weight, &b = adapter_out_->weight;
    const at::Tensor length = at::linalg_vector_norm(rows, 2, {1}, false, at::kFloat),
                     both = row_products(at::matmul(rows, a.t()), b),
                     thin = row_products(at::matmul(b, at::matmul(a, a.t())), b);
    const double scale = adapter_.scale;
    const at::Tensor change = both * (2.0 * scale) + thin * (scale * scale);
    if (!after) {
      plain = length;
      adapted = (length.square() + change).sqrt();
      return;
    }
    const at::Tensor sums = after->gather(at::stack({length.square(), change}).unsqueeze(0)).sum(0);
    plain = sums[0].sqrt();
    adapted = (sums[0] + sums[1]).sqrt();
  };
  at::Tensor plain, adapted;
  lengths_of(plain, adapted);
  return (magnitude_.to(at::kFloat) + plain) / adapted;
}

at::Tensor Linear::lengths(const JointPtr& after) const {
  return magnitude_.defined() && !drops() ? length_ratio(after) : at::Tensor();
}

/// With dropout and lengths as PEFT has them: x as it is through the weight, and what changes it with x that
/// comes through dropout.
at::Tensor Linear::adapted(const at::Tensor& x, const at::Tensor& residual, Output output,
                           const Joints& joints) const {
  if (!has_adapter()) return residual;
  const at::Tensor seen = drops() ? at::dropout(x, adapter_.dropout, true) : x;
  if (!magnitude_.defined() || !drops()) return low_rank(seen, residual, output, joints);
  const at::Tensor ratio = length_ratio(joints.after);
  const at::Tensor product = linear(seen, weight, {}, layout_, {}, {}, Output::kRead, joints);
  return plus(times_rows(product, ratio - 1.0) + times_rows(low_rank(seen, {}, Output::kRead, joints), ratio),
              residual);
}

at::Tensor Linear::forward(const at::Tensor& x, const at::Tensor& residual,
                           const std::optional<Fp8Recipe>& fp8, Output output, const Joints& joints) const {
  const at::Tensor ratio = lengths(joints.after);
  if (!ratio.defined())
    return linear(x, weight, bias, layout_, adapted(x, residual, output, joints), fp8, output, joints);
  // The gradient of lengths reads the product, which is made again where blocks are.
  const at::Tensor sum =
      linear(x, weight, {}, layout_, adapted(x, {}, Output::kRead, joints), fp8, Output::kRead, joints);
  return plus(plus(times_rows(sum, ratio), bias), residual);
}

namespace {

/// (sum of out_i) fp32, of layers on one input; undefined where none has lengths.
at::Tensor joined_lengths(const std::vector<const Linear*>& layers) {
  std::vector<at::Tensor> lengths;
  bool any = false;
  for (const Linear* layer : layers) {
    const at::Tensor own = layer->lengths();
    any = any || own.defined();
    lengths.push_back(own.defined()
                          ? own
                          : at::ones({layer->weight.size(0)},
                                     layer->weight.options().dtype(at::kFloat).requires_grad(false)));
  }
  return any ? at::cat(lengths) : at::Tensor();
}

}  // namespace

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
    if (before) shape[shape.size() - 2] *= before->size();
    added.push_back(layer->has_adapter()
                        ? layer->adapted(x, {}, Output::kRead, {.before = before, .after = {}})
                        : at::zeros(shape, x.options()));
  }
  const at::Tensor all = at::cat(added, -1);
  added.clear();  // nothing keeps them for backward
  const at::Tensor sum = linear_group(x, weights, fp8, before, all), lengths = joined_lengths(layers);
  return lengths.defined() ? times_rows(sum, lengths) : sum;
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
