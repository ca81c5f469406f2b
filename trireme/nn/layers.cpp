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
at::Tensor Linear::low_rank(const at::Tensor& thin, const at::Tensor& residual, Output output,
                            const JointPtr& before) const {
  return adapter_out_->forward(thin * adapter_.scale, residual, {}, output, {.before = before, .after = {}});
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
at::Tensor Linear::beside(const at::Tensor& x, const at::Tensor& residual, Output output,
                          const Joints& joints) const {
  if (!has_adapter()) return residual;
  const at::Tensor seen = at::dropout(x, adapter_.dropout, true),
                   thin = linear(seen, adapter_a(), {}, WeightLayout::kOutIn, {}, {}, Output::kRead,
                                 {.before = {}, .after = joints.after});
  if (!magnitude_.defined()) return low_rank(thin, residual, output, joints.before);
  const at::Tensor ratio = length_ratio(joints.after);
  const at::Tensor product = linear(seen, weight, {}, layout_, {}, {}, Output::kRead, joints),
                   added = low_rank(thin, {}, Output::kRead, joints.before);
  return plus(scale_columns(product, ratio - 1.0) + scale_columns(added, ratio), residual);
}

at::Tensor Linear::forward(const at::Tensor& x, const at::Tensor& residual,
                           const std::optional<Fp8Recipe>& fp8, Output output, const Joints& joints) const {
  if (taps())
    return forward(tapped_linear(x, adapter_a(), {.before = {}, .after = joints.after}), residual, fp8,
                   output, joints);
  return linear(x, weight, bias, layout_, beside(x, residual, output, joints), fp8, output, joints);
}

at::Tensor Linear::forward(const Tapped& tapped, const at::Tensor& residual,
                           const std::optional<Fp8Recipe>& fp8, Output output, const Joints& joints) const {
  const at::Tensor &thin = tapped.made, &x = tapped.passed, ratio = lengths(joints.after);
  if (!ratio.defined())
    return linear(x, weight, bias, layout_, low_rank(thin, residual, output, joints.before), fp8, output,
                  joints);
  // The gradient of lengths reads the product, which is made again where blocks are.
  const at::Tensor sum = linear(x, weight, {}, layout_, low_rank(thin, {}, Output::kRead, joints.before), fp8,
                                Output::kRead, joints);
  return plus(plus(scale_columns(sum, ratio), bias), residual);
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

std::vector<at::Tensor> weights_of(const std::vector<const Linear*>& layers) {
  std::vector<at::Tensor> weights;
  for (const Linear* layer : layers) weights.push_back(layer->weight);
  return weights;
}

/// The matrices A of layers that have adapters.
std::vector<at::Tensor> readers_of(const std::vector<const Linear*>& layers) {
  std::vector<at::Tensor> readers;
  for (const Linear* layer : layers)
    if (layer->has_adapter()) readers.push_back(layer->adapter_a());
  return readers;
}

/// Whether the adapters of layers on one input read what these read, and are scaled alike.
bool taps_once(const std::vector<const Linear*>& layers) {
  const Linear* first = nullptr;
  for (const Linear* layer : layers) {
    if (!layer->has_adapter()) continue;
    if (first == nullptr) first = layer;
    if (!layer->taps() || layer->adapter().scale != first->adapter().scale) return false;
  }
  return first != nullptr;
}

at::Tensor scaled(const at::Tensor& sum, const std::vector<const Linear*>& layers) {
  const at::Tensor lengths = joined_lengths(layers);
  return lengths.defined() ? scale_columns(sum, lengths) : sum;
}

/// The output of layers whose adapters tap their input once.
at::Tensor tapped_group(const Tapped& tapped, const std::vector<const Linear*>& layers,
                        const std::optional<Fp8Recipe>& fp8, const JointPtr& before) {
  std::vector<at::Tensor> weights;
  std::vector<int64_t> first;
  int64_t width = 0;
  double scale = 0.0;
  for (const Linear* layer : layers) {
    if (layer->has_adapter()) {
      weights.push_back(layer->adapter_b());
      first.push_back(width);
      scale = layer->adapter().scale;
    }
    width += layer->weight.size(0);
  }
  const at::Tensor added = linear_blocks(tapped.made * scale, {weights, first, width}, before);
  return scaled(linear_group(tapped.passed, weights_of(layers), fp8, before, added), layers);
}

/// The output of layers of which some adapters read their input for themselves.
at::Tensor separate_group(const at::Tensor& x, const std::vector<const Linear*>& layers,
                          const std::optional<Fp8Recipe>& fp8, const JointPtr& before) {
  std::vector<at::Tensor> added;
  for (const Linear* layer : layers) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = layer->weight.size(0);
    if (before) shape[shape.size() - 2] *= before->size();
    added.push_back(layer->has_adapter()
                        ? layer->beside(x, {}, Output::kRead, {.before = before, .after = {}})
                        : at::zeros(shape, x.options()));
  }
  const at::Tensor all = at::cat(added, -1);
  added.clear();  // nothing keeps them for backward
  return scaled(linear_group(x, weights_of(layers), fp8, before, all), layers);
}

/// {x + delta, norm of it}, which is kept.
std::pair<at::Tensor, at::Tensor> kept_norm(const at::Tensor& x, const at::Tensor& delta, const Norm& norm,
                                            const std::optional<Fp8Recipe>& fp8) {
  return norm.bias.defined() ? add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps, fp8)
                             : add_rms_norm(x, delta, norm.weight, norm.eps, fp8);
}

}  // namespace

at::Tensor linear_group(const at::Tensor& x, const std::vector<const Linear*>& layers,
                        const std::optional<Fp8Recipe>& fp8, const JointPtr& before) {
  const std::vector<at::Tensor> readers = readers_of(layers);
  if (readers.empty()) return linear_group(x, weights_of(layers), fp8, before);
  if (!taps_once(layers)) return separate_group(x, layers, fp8, before);
  return tapped_group(tapped_linear(x, readers), layers, fp8, before);
}

std::pair<at::Tensor, at::Tensor> add_norm_linear(const at::Tensor& x, const at::Tensor& delta,
                                                  const Norm& norm, const std::vector<const Linear*>& layers,
                                                  const std::optional<Fp8Recipe>& fp8,
                                                  const JointPtr& before) {
  const std::vector<at::Tensor> readers = readers_of(layers);
  if (readers.empty())
    return add_norm_linear(x, delta, norm, weights_of(layers), {}, WeightLayout::kOutIn, fp8, before);
  if (taps_once(layers)) {
    const TappedNorm tapped = tapped_norm_linear(x, delta, norm, readers, fp8);
    return {tapped.sum, tapped_group({tapped.made, tapped.passed}, layers, fp8, before)};
  }
  const auto [sum, normed] = kept_norm(x, delta, norm, fp8);
  return {sum, separate_group(normed, layers, fp8, before)};
}

std::pair<at::Tensor, at::Tensor> add_norm_linear(const at::Tensor& x, const at::Tensor& delta,
                                                  const Norm& norm, const Linear& layer,
                                                  const std::optional<Fp8Recipe>& fp8,
                                                  const JointPtr& before) {
  if (!layer.has_adapter())
    return add_norm_linear(x, delta, norm, layer.weight, layer.bias, layer.layout(), fp8, before);
  const Joints joints{.before = before, .after = {}};
  if (layer.taps()) {
    const TappedNorm tapped = tapped_norm_linear(x, delta, norm, layer.adapter_a(), fp8);
    return {tapped.sum, layer.forward({tapped.made, tapped.passed}, {}, fp8, Output::kRead, joints)};
  }
  const auto [sum, normed] = kept_norm(x, delta, norm, fp8);
  return {sum, layer.forward(normed, {}, fp8, Output::kRead, joints)};
}

at::Tensor activated_linear(const at::Tensor& x, Activation activation, const Linear& layer,
                            const at::Tensor& residual, const std::optional<Fp8Recipe>& fp8,
                            const JointPtr& after) {
  if (!layer.has_adapter())
    return activated_linear(x, activation, layer.weight, layer.bias, layer.layout(), residual, fp8, after);
  const Joints joints{.before = {}, .after = after};
  if (layer.taps())
    return layer.forward(tapped_activated_linear(x, activation, layer.adapter_a(), fp8, after), residual, fp8,
                         Output::kRead, joints);
  return layer.forward(activation == Activation::kSwiglu ? swiglu(x, fp8) : gelu(x, fp8), residual, fp8,
                       Output::kRead, joints);
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
