#include "trireme/nn/attention.h"

#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "trireme/kernels/attention.h"
#include "trireme/kernels/cudnn_attention.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/repeatable.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Query, key and value as (B, heads, T, head_dim) views of the packed tensor.
struct Heads {
  at::Tensor query, key, value;
};

Heads split_heads(const at::Tensor& packed, const AttentionShape& shape) {
  const at::Tensor heads = packed.view({packed.size(0), packed.size(1), -1, shape.head_dim})
                               .transpose(1, 2);  // (B, H + 2K, T, hd)
  return {heads.narrow(1, 0, shape.heads), heads.narrow(1, shape.heads, shape.kv_heads),
          heads.narrow(1, shape.heads + shape.kv_heads, shape.kv_heads)};
}

void rotate(at::Tensor& packed, const AttentionShape& shape, const at::Tensor& cosine, const at::Tensor& sine,
            float direction) {
  if (!cosine.defined()) return;
  kernels::rope_inplace(packed, cosine, sine, shape.heads + shape.kv_heads, shape.head_dim, direction);
}

/// Our own kernel on the packed projection, in fp32 whatever the dtype of that.
class CpuAttentionFunction : public Function<CpuAttentionFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& qkv_in,
                            const std::optional<at::Tensor>& cosine_in,
                            const std::optional<at::Tensor>& sine_in, int64_t n_heads, int64_t kv_heads,
                            int64_t head_dim, KeptAttention* kept) {
    const at::Tensor cosine = cosine_in.value_or(at::Tensor()), sine = sine_in.value_or(at::Tensor());
    at::Tensor qkv = qkv_in.contiguous();
    const kernels::AttentionSizes sizes{qkv.size(0), qkv.size(1), n_heads, kv_heads, head_dim};
    rotate(qkv, {n_heads, kv_heads, head_dim}, cosine, sine, 1.0f);
    const variable_list results = kept_or_computed(kept, [&]() -> variable_list {
      const at::Tensor wide = qkv.to(at::kFloat);
      at::Tensor output = at::empty({sizes.batch, sizes.length, n_heads * head_dim}, wide.options());
      at::Tensor log_sums = at::empty({sizes.batch, n_heads, sizes.length}, wide.options());
      kernels::attention_forward(output.data_ptr<float>(), log_sums.data_ptr<float>(), wide.data_ptr<float>(),
                                 sizes);
      return {output.to(qkv.scalar_type()), log_sums};
    });
    context->save_for_backward({qkv, cosine, sine, results[1]});
    context->saved_data["kv_heads"] = kv_heads;
    return results[0];
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.attention");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &qkv = saved[0], &cosine = saved[1], &sine = saved[2], &log_sums = saved[3];
    const int64_t heads = log_sums.size(1), kv_heads = context->saved_data["kv_heads"].toInt();
    const int64_t head_dim = grads[0].size(2) / heads;
    const at::Tensor d_output = grads[0].to(at::kFloat).contiguous(), wide = qkv.to(at::kFloat);
    at::Tensor d_wide = at::empty_like(wide);
    kernels::attention_backward(d_wide.data_ptr<float>(), d_output.data_ptr<float>(), wide.data_ptr<float>(),
                                log_sums.data_ptr<float>(),
                                {qkv.size(0), qkv.size(1), heads, kv_heads, head_dim});
    at::Tensor d_qkv = d_wide.to(qkv.scalar_type());
    rotate(d_qkv, {heads, kv_heads, head_dim}, cosine, sine, -1.0f);
    return {d_qkv, {}, {}, {}, {}, {}, {}};
  }
};

/// cuDNN's attention as torch calls it; it knows groups of query heads. bf16 and fp16 on a GPU.
struct TorchCudnn {
  static variable_list forward(const Heads& heads) {
    const auto [output, logsumexp, first_q, first_k, max_q, max_k, seed, offset, mask] =
        at::_scaled_dot_product_cudnn_attention(heads.query, heads.key, heads.value, {},
                                                /*compute_log_sumexp=*/true, 0.0, /*is_causal=*/true);
    return {output, logsumexp, seed, offset};
  }

  static void backward(at::Tensor& d_qkv, const at::Tensor& d_output, const Heads& heads,
                       const variable_list& kept, const AttentionShape&, const at::Tensor& cosine,
                       const at::Tensor& sine) {
    const int64_t length = d_qkv.size(1);
    const auto [d_query, d_key, d_value] = at::_scaled_dot_product_cudnn_attention_backward(
        d_output, heads.query, heads.key, heads.value, kept[0], kept[1], kept[2], kept[3], {}, {}, {}, length,
        length, 0.0, /*is_causal=*/true);
    kernels::pack_head_gradients(d_qkv, d_query, d_key, d_value, cosine, sine);
  }
};

/// cuDNN forward, FlashAttention backward. cuDNN's backward of several tiles of keys adds their parts of the
/// query's gradient in the order in which blocks arrive, and torch does not pass on the wish for another one;
/// FlashAttention's gives each block a sum of its own and adds those in their order.
struct CudnnFlash {
  static variable_list forward(const Heads& heads) { return TorchCudnn::forward(heads); }

  static void backward(at::Tensor& d_qkv, const at::Tensor& d_output, const Heads& heads,
                       const variable_list& kept, const AttentionShape& shape, const at::Tensor& cosine,
                       const at::Tensor& sine) {
    const int64_t length = d_qkv.size(1);
    const at::Tensor logsumexp = kept[1].reshape({d_qkv.size(0), shape.heads, length});
    const auto [d_query, d_key, d_value] = at::_scaled_dot_product_flash_attention_backward(
        d_output, heads.query, heads.key, heads.value, kept[0], logsumexp, {}, {}, length, length, 0.0,
        /*is_causal=*/true, kept[2], kept[3]);
    kernels::pack_head_gradients(d_qkv, d_query, d_key, d_value, cosine, sine);
  }
};

/// cuDNN in both directions, backward by a graph of ours, straight into the packed gradient. Otherwise: for
/// what cuDNN has no such plan.
template <kernels::SumOrder kOrder, typename Otherwise>
struct CudnnGraph {
  static variable_list forward(const Heads& heads) { return TorchCudnn::forward(heads); }

  static void backward(at::Tensor& d_qkv, const at::Tensor& d_output, const Heads& heads,
                       const variable_list& kept, const AttentionShape& shape, const at::Tensor& cosine,
                       const at::Tensor& sine) {
    const at::Tensor logsumexp = kept[1].reshape({d_qkv.size(0), shape.heads, d_qkv.size(1)});
    const Heads d_heads = split_heads(d_qkv, shape);
    kernels::AttentionGradients gradients{d_heads.query, d_heads.key, d_heads.value};
    if (!kernels::attention_backward(gradients, d_output,
                                     {heads.query, heads.key, heads.value, kept[0], logsumexp}, kOrder)) {
      return Otherwise::backward(d_qkv, d_output, heads, kept, shape, cosine, sine);
    }
    rotate(d_qkv, shape, cosine, sine, -1.0f);
  }
};

using Cudnn = CudnnGraph<kernels::SumOrder::kAny, TorchCudnn>;
using CudnnOrdered = CudnnGraph<kernels::SumOrder::kFixed, CudnnFlash>;

/// Rotation in place on the packed projection, then attention that computes its probabilities again in
/// backward.
template <typename Backend>
class FusedAttentionFunction : public Function<FusedAttentionFunction<Backend>> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& qkv_in,
                            const std::optional<at::Tensor>& cosine_in,
                            const std::optional<at::Tensor>& sine_in, int64_t n_heads, int64_t kv_heads,
                            int64_t head_dim, KeptAttention* kept) {
    const at::Tensor cosine = cosine_in.value_or(at::Tensor()), sine = sine_in.value_or(at::Tensor());
    const AttentionShape shape{n_heads, kv_heads, head_dim};
    at::Tensor qkv = qkv_in.contiguous();
    rotate(qkv, shape, cosine, sine, 1.0f);
    const variable_list results =
        kept_or_computed(kept, [&] { return Backend::forward(split_heads(qkv, shape)); });
    variable_list saved = {qkv, cosine, sine};
    saved.insert(saved.end(), results.begin(), results.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["shape"] = std::vector<int64_t>{n_heads, kv_heads, head_dim};
    return results[0].transpose(1, 2).reshape({qkv.size(0), qkv.size(1), n_heads * head_dim});
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.attention");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &qkv = saved[0], &cosine = saved[1], &sine = saved[2];
    const variable_list kept(saved.begin() + 3, saved.end());
    const std::vector<int64_t> sizes = context->saved_data["shape"].toIntVector();
    const AttentionShape shape{sizes[0], sizes[1], sizes[2]};
    const at::Tensor d_output =
        grads[0].contiguous().view({qkv.size(0), qkv.size(1), shape.heads, shape.head_dim}).transpose(1, 2);
    at::Tensor d_qkv = at::empty_like(qkv);
    Backend::backward(d_qkv, d_output, split_heads(qkv, shape), kept, shape, cosine, sine);
    return {d_qkv, {}, {}, {}, {}, {}, {}};
  }
};

at::Tensor rotated(const at::Tensor& heads, const RopeTable& rope) {
  const std::vector<at::Tensor> halves = heads.to(at::kFloat).chunk(2, -1);
  const at::Tensor& c = rope.cosine;
  const at::Tensor& s = rope.sine;
  return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1).to(heads.scalar_type());
}

// The limits of cuDNN's attention, beside more than one token: head_dim is a multiple of the first and in
// backward at most the second, on at least this compute capability.
constexpr int64_t kCudnnHeadDims = 8, kCudnnMaxHeadDim = 128;
constexpr int kCudnnCapability = 8;
constexpr int kOrderedCapability = 9;  ///< where cuDNN has engines for a backward pass without sums in memory

/// Keys of one tile of cuDNN's backward on Hopper: nothing is added up between blocks until there are more.
constexpr int64_t kCudnnTile = 128;

/// The heads with queries and keys turned by their positions, in differentiable operations.
Heads rotated_heads(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope) {
  Heads heads = split_heads(qkv, shape);
  if (!rope.cosine.defined()) return heads;
  return {rotated(heads.query, rope), rotated(heads.key, rope), heads.value};
}

/// (B, heads, T, head_dim) -> (B, T, heads * head_dim).
at::Tensor side_by_side(const at::Tensor& output) {
  return output.transpose(1, 2).flatten(2);
}

/// Attention by ATen's own choice, in differentiable operations.
at::Tensor aten_attention(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                          double dropout) {
  const auto [query, key, value] = rotated_heads(qkv, shape, rope);
  return side_by_side(at::scaled_dot_product_attention(query, key, value, {}, dropout, true, std::nullopt,
                                                       shape.heads != shape.kv_heads));
}

/// Attention as its formula has it, in differentiable operations, with the softmax in fp32. Backward keeps
/// what plan::block_bytes() counts: copies of the heads, and the probabilities.
at::Tensor eager_attention(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                           double dropout) {
  const auto [query, key, value] = rotated_heads(qkv, shape, rope);
  const int64_t length = qkv.size(1), group = shape.heads / shape.kv_heads;
  const auto of_each_query = [group](const at::Tensor& heads) {
    return (group == 1 ? heads : heads.repeat_interleave(group, 1)).contiguous();
  };
  const at::Tensor scaled = (query / std::sqrt(static_cast<double>(shape.head_dim))).contiguous();
  // Added, since that keeps nothing for backward.
  const at::Tensor hidden =
      at::full({length, length}, -std::numeric_limits<double>::infinity(), qkv.options()).triu(1);
  const at::Tensor scores = at::matmul(scaled, of_each_query(key).transpose(2, 3)) + hidden;
  const at::ScalarType wide = at::toOpMathType(qkv.scalar_type());
  at::Tensor weights = at::softmax(scores, -1, wide).to(qkv.scalar_type());
  if (dropout > 0.0) weights = std::get<0>(at::native_dropout(weights, dropout, /*train=*/true));
  return side_by_side(at::matmul(weights, of_each_query(value)));
}

at::Tensor stretched(const at::Tensor& frequencies, const RopeStretch& stretch) {
  if (stretch.factor == 1.0) return frequencies;
  const auto length = static_cast<double>(stretch.original_len);
  const at::Tensor turns = frequencies * (length / (2.0 * std::numbers::pi));  // in original_len tokens
  const at::Tensor kept = ((turns - stretch.low_freq) / (stretch.high_freq - stretch.low_freq)).clamp(0, 1);
  return kept * frequencies + (1.0 - kept) * frequencies / stretch.factor;
}

}  // namespace

RopeTable make_rope_table(int64_t seq_len, int64_t head_dim, double theta, at::Device device,
                          const RopeStretch& stretch) {
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor exponents = at::arange(0, head_dim, 2, options) / static_cast<double>(head_dim);
  const at::Tensor frequencies = stretched(1.0 / at::pow(theta, exponents), stretch);
  const at::Tensor angles = at::outer(at::arange(seq_len, options), frequencies);
  return {angles.cos().to(device).contiguous(), angles.sin().to(device).contiguous()};
}

AttentionBackend attention_backend(at::Device device, at::ScalarType dtype, int64_t length, int64_t head_dim,
                                   double dropout) {
  if (dropout > 0.0) return AttentionBackend::kAten;
  if (device.is_cpu()) return dtype == at::kDouble ? AttentionBackend::kAten : AttentionBackend::kCpu;
  static const bool modern = !kernels::gpus().empty() && kernels::gpus().front().major >= kCudnnCapability;
  const bool fits =
      dtype != at::kFloat && length > 1 && head_dim % kCudnnHeadDims == 0 && head_dim <= kCudnnMaxHeadDim;
  if (!fits || !modern || !at::globalContext().userEnabledCuDNN() || !at::globalContext().hasCuDNN()) {
    return AttentionBackend::kAten;
  }
  if (!kernels::must_repeat()) return AttentionBackend::kCudnn;
  static const bool hopper = kernels::gpus().front().major == kOrderedCapability;
  return hopper ? AttentionBackend::kCudnnOrdered : AttentionBackend::kCudnnFlash;
}

std::string_view name(AttentionBackend backend) {
  switch (backend) {
    case AttentionBackend::kCpu:
      return "tiles in fp32";
    case AttentionBackend::kCudnn:
      return "cuDNN";
    case AttentionBackend::kCudnnOrdered:
      return "cuDNN, backward in a fixed order";
    case AttentionBackend::kCudnnFlash:
      return "cuDNN, backward by FlashAttention in a fixed order";
    case AttentionBackend::kFlash:
      return "FlashAttention by documents";
    case AttentionBackend::kAten:
      return "ATen";
    case AttentionBackend::kEager:
      return "products and a softmax";
  }
  return "";
}

bool repeats_bits(AttentionBackend backend, int64_t length) {
  switch (backend) {
    case AttentionBackend::kCpu:
    case AttentionBackend::kCudnnOrdered:
    case AttentionBackend::kCudnnFlash:
    case AttentionBackend::kEager:
      return true;
    case AttentionBackend::kCudnn:
      return length <= kCudnnTile;
    case AttentionBackend::kFlash:
    case AttentionBackend::kAten:
      return kernels::must_repeat();
  }
  return false;
}

at::Tensor causal_attention(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                            double dropout, KeptAttention* kept) {
  if (shape.kind == plan::AttentionKind::kEager) return eager_attention(qkv, shape, rope, dropout);
  const auto [heads, kv_heads, head_dim, kind] = shape;
  const auto cosine = optional(rope.cosine), sine = optional(rope.sine);
  switch (attention_backend(qkv.device(), qkv.scalar_type(), qkv.size(1), head_dim, dropout)) {
    case AttentionBackend::kCpu:
      return CpuAttentionFunction::apply(qkv, cosine, sine, heads, kv_heads, head_dim, kept);
    case AttentionBackend::kCudnn:
      return FusedAttentionFunction<Cudnn>::apply(qkv, cosine, sine, heads, kv_heads, head_dim, kept);
    case AttentionBackend::kCudnnOrdered:
      return FusedAttentionFunction<CudnnOrdered>::apply(qkv, cosine, sine, heads, kv_heads, head_dim, kept);
    case AttentionBackend::kCudnnFlash:
      return FusedAttentionFunction<CudnnFlash>::apply(qkv, cosine, sine, heads, kv_heads, head_dim, kept);
    case AttentionBackend::kFlash:
    case AttentionBackend::kAten:
    case AttentionBackend::kEager:
      break;
  }
  return aten_attention(qkv, shape, rope, dropout);
}

}  // namespace trireme::nn
