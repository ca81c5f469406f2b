#include "trireme/nn/attention_part.h"

#include <ATen/ATen.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "trireme/kernels/attention.h"
#include "trireme/nn/attention.h"

namespace trireme::nn {
namespace {

AttentionBackend backend_of(const AttentionPart& part) {
  const int64_t length = std::min(part.query.size(1), part.key.size(1));
  return attention_backend(part.query.device(), part.query.scalar_type(), length, part.query.size(3), 0.0);
}

/// (B, T, H) -> (B, H, T), contiguous.
at::Tensor by_head(const at::Tensor& x) {
  return x.transpose(1, 2).contiguous();
}

/// Sums over head_dim of output times gradient, (B, Tq, H) fp32.
at::Tensor dots_of(const at::Tensor& d_output, const at::Tensor& output) {
  return (d_output.to(at::kFloat) * output.to(at::kFloat)).sum(-1);
}

/// Our own kernel, in fp32 whatever the dtype of its input.
class OwnKernel {
 public:
  explicit OwnKernel(const AttentionPart& part)
      : query_(wide(part.query)), key_(wide(part.key)), value_(wide(part.value)), sizes_{part.query.size(0),
                                                                                         part.query.size(1),
                                                                                         part.key.size(1),
                                                                                         part.query.size(2),
                                                                                         part.key.size(2),
                                                                                         part.query.size(3),
                                                                                         part.is_causal} {}

  PartOutput forward() const {
    PartOutput made{at::empty(query_.sizes(), query_.options()),
                    at::empty({sizes_.batch, sizes_.heads, sizes_.queries}, query_.options())};
    kernels::attention_part_forward(written(made.output), made.log_sums.data_ptr<float>(), input(), sizes_);
    return made;
  }

  PartGradients backward(const at::Tensor& d_output, const at::Tensor& output,
                         const at::Tensor& log_sums) const {
    PartGradients made{empty_like(query_), empty_like(key_), empty_like(value_)};
    const at::Tensor d_wide = wide(d_output), dots = by_head(dots_of(d_output, output)),
                     sums = log_sums.contiguous();
    kernels::attention_part_backward({written(made.query), written(made.key), written(made.value)},
                                     read(d_wide), input(), sums.data_ptr<float>(), dots.data_ptr<float>(),
                                     sizes_);
    return made;
  }

 private:
  static at::Tensor wide(const at::Tensor& heads) {
    const at::Tensor floats = heads.to(at::kFloat);
    return floats.stride(3) == 1 && floats.stride(2) == floats.size(3) ? floats : floats.contiguous();
  }
  static at::Tensor empty_like(const at::Tensor& heads) { return at::empty(heads.sizes(), heads.options()); }
  static kernels::HeadRows<const float> read(const at::Tensor& heads) {
    return {heads.data_ptr<float>(), heads.stride(0), heads.stride(1)};
  }
  static kernels::HeadRows<float> written(const at::Tensor& heads) {
    return {heads.data_ptr<float>(), heads.stride(0), heads.stride(1)};
  }
  kernels::AttentionPartInput input() const { return {read(query_), read(key_), read(value_)}; }

  at::Tensor query_, key_, value_;
  kernels::AttentionPartSizes sizes_;
};

/// cuDNN forward; backward by cuDNN, or by FlashAttention, which can repeat its bits. Both take the output
/// and the logarithms of any part of the keys. They want (B, heads, T, head_dim), in any strides.
class Fused {
 public:
  explicit Fused(const AttentionPart& part)
      : query_(part.query.transpose(1, 2)),
        key_(part.key.transpose(1, 2)),
        value_(part.value.transpose(1, 2)),
        is_causal_(part.is_causal) {}

  PartOutput forward() const {
    const auto results =
        at::_scaled_dot_product_cudnn_attention(query_, key_, value_, {},
                                                /*compute_log_sumexp=*/true, 0.0, is_causal_);
    return {std::get<0>(results).transpose(1, 2), std::get<1>(results).reshape(sums_shape())};
  }

  PartGradients backward(const at::Tensor& d_output, const at::Tensor& output, const at::Tensor& log_sums,
                         bool repeats) const {
    const at::Tensor d_out = d_output.transpose(1, 2), out = output.transpose(1, 2);
    const at::Tensor unused = at::zeros({}, query_.options().dtype(at::kLong));  // nothing is drawn
    const int64_t queries = query_.size(2), keys = key_.size(2);
    const auto [query, key, value] =
        repeats ? at::_scaled_dot_product_flash_attention_backward(d_out, query_, key_, value_, out,
                                                                   log_sums.contiguous(), {}, {}, queries,
                                                                   keys, 0.0, is_causal_, unused, unused)
                : at::_scaled_dot_product_cudnn_attention_backward(
                      d_out, query_, key_, value_, out, log_sums.contiguous().unsqueeze(-1), unused, unused,
                      {}, {}, {}, queries, keys, 0.0, is_causal_);
    return {query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)};
  }

 private:
  at::IntArrayRef sums_shape() const { return query_.sizes().slice(0, 3); }

  at::Tensor query_, key_, value_;
  bool is_causal_;
};

/// By products of matrices, in fp32, with all scores in memory: for what no kernel computes.
class Products {
 public:
  explicit Products(const AttentionPart& part)
      : scale_(1.0 / std::sqrt(static_cast<double>(part.query.size(3)))),
        group_(part.query.size(2) / part.key.size(2)),
        is_causal_(part.is_causal),
        query_(heads_first(part.query) * scale_),
        key_(heads_first(part.key).repeat_interleave(group_, 1)),
        value_(heads_first(part.value).repeat_interleave(group_, 1)) {}

  PartOutput forward() const {
    const at::Tensor all = scores(), log_sums = all.logsumexp(-1);
    return {at::matmul((all - log_sums.unsqueeze(-1)).exp(), value_).transpose(1, 2), log_sums};
  }

  PartGradients backward(const at::Tensor& d_output, const at::Tensor& output,
                         const at::Tensor& log_sums) const {
    const at::Tensor d_out = heads_first(d_output), dots = by_head(dots_of(d_output, output));
    const at::Tensor probabilities = (scores() - log_sums.unsqueeze(-1)).exp();
    const at::Tensor d_scores =
        probabilities * (at::matmul(d_out, value_.transpose(2, 3)) - dots.unsqueeze(-1));
    return {(at::matmul(d_scores, key_) * scale_).transpose(1, 2),
            shared(at::matmul(d_scores.transpose(2, 3), query_)),
            shared(at::matmul(probabilities.transpose(2, 3), d_out))};
  }

 private:
  static at::Tensor heads_first(const at::Tensor& heads) { return heads.to(at::kFloat).transpose(1, 2); }
  at::Tensor scores() const {
    const at::Tensor all = at::matmul(query_, key_.transpose(2, 3));  // (B, H, Tq, Tk)
    if (!is_causal_) return all;
    const at::Tensor hidden = at::ones({all.size(2), all.size(3)}, all.options().dtype(at::kBool)).triu(1);
    return all.masked_fill(hidden, -std::numeric_limits<float>::infinity());
  }
  /// Gradients for query heads (B, H, Tk, head_dim) -> of the heads that groups of these share.
  at::Tensor shared(const at::Tensor& gradient) const {
    return gradient.unflatten(1, {-1, group_}).sum(2).transpose(1, 2);
  }

  double scale_;
  int64_t group_;
  bool is_causal_;
  at::Tensor query_, key_, value_;  ///< (B, H, T, head_dim); queries times scale_
};

}  // namespace

PartOutput attend(const AttentionPart& part) {
  switch (backend_of(part)) {
    case AttentionBackend::kCpu:
      return OwnKernel(part).forward();
    case AttentionBackend::kCudnn:
    case AttentionBackend::kCudnnOrdered:
    case AttentionBackend::kCudnnFlash:
      return Fused(part).forward();
    case AttentionBackend::kFlash:
    case AttentionBackend::kAten:
    case AttentionBackend::kEager:
      break;
  }
  return Products(part).forward();
}

PartGradients attend_backward(const AttentionPart& part, const at::Tensor& d_output, const at::Tensor& output,
                              const at::Tensor& log_sums) {
  const AttentionBackend backend = backend_of(part);
  switch (backend) {
    case AttentionBackend::kCpu:
      return OwnKernel(part).backward(d_output, output, log_sums);
    case AttentionBackend::kCudnn:
    case AttentionBackend::kCudnnOrdered:
    case AttentionBackend::kCudnnFlash:
      return Fused(part).backward(d_output, output, log_sums, backend != AttentionBackend::kCudnn);
    case AttentionBackend::kFlash:
    case AttentionBackend::kAten:
    case AttentionBackend::kEager:
      break;
  }
  return Products(part).backward(d_output, output, log_sums);
}

}  // namespace trireme::nn
