// Layers and losses on a rank's parts.
#include <ATen/ATen.h>

#include <limits>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/nn/functional.h"
#include "trireme/tensor/local_ops.h"

namespace trireme::tensor::local {
namespace {

using plan::Op;

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

/// Where `index` is outside [begin, end).
at::Tensor outside(const at::Tensor& index, int64_t begin, int64_t end) {
  return at::logical_or(at::lt(index, begin), at::ge(index, end));
}

/// Throws DataError on a CPU for an index that is outside [0, end); reading it back from a GPU would wait.
void check_indices(const OpCall& call, const at::Tensor& index, int64_t end) {
  if (!index.is_cpu() || index.numel() == 0) return;
  const auto [least, most] = at::aminmax(index);
  const int64_t lowest = least.item<int64_t>(), highest = most.item<int64_t>();
  if (lowest >= 0 && highest < end) return;
  throw DataError(
      "[tensor.op_kernels] {} on rank {} of {}: index {} is outside 0 to {}; pass indices below {}", call.op,
      call.rank, call.ranks, lowest < 0 ? lowest : highest, end - 1, end);
}

/// The rows of this rank's part of a table, zeros for the rows of others. Each rank's result depends on its
/// part, also where that is empty.
at::Tensor own_rows(const at::Tensor& index, const at::Tensor& table, int64_t first, int64_t words) {
  const at::Tensor foreign = outside(index, first, first + table.size(0));
  plan::Shape shape = index.sizes().vec();
  shape.push_back(table.size(1));
  const at::Tensor rows = table.size(0) == 0
                              ? table.sum(0).expand(shape)
                              : at::embedding(table, at::masked_fill(index - first, foreign, 0));
  const at::Tensor instead = at::where(outside(index, 0, words), kNoNumber, 0.0).to(table.scalar_type());
  return at::where(foreign.unsqueeze(-1), instead.unsqueeze(-1), rows);
}

/// NaN, gradients too, where a target is no class. `log_p` (rows, classes) is fp32.
at::Tensor word_loss(const at::Tensor& log_p, const at::Tensor& targets) {
  constexpr int64_t kLeftOut = -1;
  const at::Tensor wrong = outside(targets, 0, log_p.size(1));
  const at::Tensor loss =
      at::nll_loss(log_p, at::masked_fill(targets, wrong, kLeftOut), {}, at::Reduction::Sum, kLeftOut);
  return targets.is_cpu() ? loss : loss * at::where(wrong.any(), kNoNumber, 1.0).to(at::kFloat);
}

}  // namespace

/// A parameter as it is stored, whose gradient a backward pass may leave for later (nn/deferred_gradients.h).
bool is_parameter(const at::Tensor& weight, const at::Tensor& x) {
  return weight.dim() == 2 && weight.is_leaf() && weight.requires_grad() && at::GradMode::is_enabled() &&
         weight.numel() > 0 && x.numel() > 0;
}

Tensors multiplied(const OpCall& call, const Tensors& in) {
  const bool in_out = call.op == Op::kMatmul;
  if (is_parameter(in[1], in[0]))
    return {nn::linear(in[0], in[1], in.size() > 2 ? in[2] : at::Tensor(),
                       in_out ? nn::WeightLayout::kInOut : nn::WeightLayout::kOutIn)};
  if (in_out) return {at::matmul(in[0], in[1])};
  return {at::linear(in[0], in[1], in.size() > 2 ? in[2] : at::Tensor())};
}

Tensors looked_up(const OpCall& call, const Tensors& in) {
  const plan::Shape& table = call.types[1].shape;
  check_indices(call, in[0], table[0]);
  const plan::TensorPlacement& placement = call.strategy.inputs[1];
  const bool has_all = !placement.is_shard() || placement.dim != 0;
  if (has_all && in[0].is_cpu() && table[0] > 0) return {at::embedding(in[1], in[0])};
  const int64_t first = has_all ? 0 : plan::shard_range(table[0], call.ranks, call.rank).begin;
  return {own_rows(in[0], in[1], first, table[0])};
}

Tensors attended(const OpCall& call, const Tensors& in) {
  const bool causal = call.attributes.whole[0] != 0, shares_keys = in[0].size(1) != in[1].size(1);
  return {at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0.0, causal, call.attributes.real[0],
                                           shares_keys)};
}

Tensors softened(const OpCall& call, const Tensors& in) {
  const int64_t dim = call.attributes.whole[0];
  return {call.op == Op::kSoftmax ? at::softmax(in[0], dim) : at::log_softmax(in[0], dim)};
}

Tensors normed(const OpCall& call, const Tensors& in) {
  const plan::Shape width = {in[0].size(-1)};
  const auto operand = [&in](size_t index) {
    return index < in.size() ? std::optional(in[index]) : std::nullopt;
  };
  const double eps = call.attributes.real[0];
  if (call.op == Op::kLayerNorm) return {at::layer_norm(in[0], width, operand(1), operand(2), eps)};
  return {at::rms_norm(in[0], width, operand(1), eps)};
}

Tensors mean_loss(const OpCall& call, const Tensors& in) {
  const bool words = call.op == Op::kCrossEntropy;
  const at::Tensor x = in[0].to(at::kFloat);
  if (words) check_indices(call, in[1], call.types[0].shape[1]);
  const at::Tensor sum = words ? word_loss(at::log_softmax(x, 1), in[1])
                               : at::mse_loss(x, in[1].to(at::kFloat), at::Reduction::Sum);
  double count = 1.0;
  for (const int64_t size : call.types[words ? 1 : 0].shape) count *= static_cast<double>(size);
  return {sum.div(count).to(in[0].scalar_type())};
}

}  // namespace trireme::tensor::local
