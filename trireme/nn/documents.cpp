#include "trireme/nn/documents.h"

#include <ATen/ATen.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>

#include <utility>
#include <vector>

#include "trireme/kernels/attention.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Turns packed queries and keys to their places, or back. Without a table: leaves them.
void turn(at::Tensor& packed, const AttentionShape& shape, const RopeTable& rope, float direction) {
  if (!rope.cosine.defined()) return;
  kernels::rope_inplace(packed, rope.cosine, rope.sine, shape.heads + shape.kv_heads, shape.head_dim,
                        direction);
}

AttentionShape saved_shape(AutogradContext& context) {
  const std::vector<int64_t> sizes = context.saved_data["shape"].toIntVector();
  return {sizes[0], sizes[1], sizes[2]};
}

/// Our own kernel, in fp32 whatever the dtype of its input.
struct OwnDocumentKernel {
  static constexpr bool kReadsOutput = false;  ///< in backward

  static kernels::AttentionSizes sizes(const at::Tensor& qkv, const AttentionShape& shape) {
    return {qkv.size(0), qkv.size(1), shape.heads, shape.kv_heads, shape.head_dim};
  }

  static variable_list forward(const at::Tensor& qkv, const AttentionShape& shape, const at::Tensor& starts) {
    const at::Tensor wide = qkv.to(at::kFloat);
    at::Tensor output = at::empty({qkv.size(0), qkv.size(1), shape.heads * shape.head_dim}, wide.options());
    at::Tensor log_sums = at::empty({qkv.size(0), shape.heads, qkv.size(1)}, wide.options());
    kernels::attention_forward(output.data_ptr<float>(), log_sums.data_ptr<float>(), wide.data_ptr<float>(),
                               sizes(qkv, shape), starts.const_data_ptr<int32_t>());
    return {output.to(qkv.scalar_type()), log_sums};
  }

  static at::Tensor backward(const at::Tensor& d_output, const at::Tensor& qkv, const AttentionShape& shape,
                             const at::Tensor& starts, const variable_list& kept) {
    const at::Tensor d_wide_output = d_output.to(at::kFloat).contiguous(), wide = qkv.to(at::kFloat);
    at::Tensor d_wide = at::empty_like(wide);
    kernels::attention_backward(d_wide.data_ptr<float>(), d_wide_output.data_ptr<float>(),
                                wide.data_ptr<float>(), kept[1].data_ptr<float>(), sizes(qkv, shape),
                                starts.const_data_ptr<int32_t>());
    return d_wide.to(qkv.scalar_type());
  }
};

/// FlashAttention over sequences of any lengths (Dao et al. 2022), one after another in memory: it is given
/// the table of their ends on the GPU, so that the host need not know it. Where torch is told to repeat bits,
/// its backward pass adds in a fixed order.
struct FlashDocuments {
  static constexpr bool kReadsOutput = true;

  /// Views of qkv (B, T, heads): (B T, heads of a kind, head_dim).
  struct Tokens {
    Tokens(const at::Tensor& qkv, const AttentionShape& shape)
        : all(qkv.view({qkv.size(0) * qkv.size(1), -1, shape.head_dim})),
          query(all.narrow(1, 0, shape.heads)),
          key(all.narrow(1, shape.heads, shape.kv_heads)),
          value(all.narrow(1, shape.heads + shape.kv_heads, shape.kv_heads)) {}
    at::Tensor all, query, key, value;
  };

  static variable_list forward(const at::Tensor& qkv, const AttentionShape& shape, const at::Tensor& ends) {
    const Tokens tokens(qkv, shape);
    const int64_t longest = qkv.size(1);
    const std::optional<at::Tensor> table = ends;
    const auto [output, log_sums, seed, unused, mask] =
        at::_flash_attention_forward(tokens.query, tokens.key, tokens.value, table, table, longest, longest,
                                     /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false);
    return {output.view({qkv.size(0), longest, -1}), log_sums, seed, unused};
  }

  static at::Tensor backward(const at::Tensor& d_output, const at::Tensor& qkv, const AttentionShape& shape,
                             const at::Tensor& ends, const variable_list& kept) {
    const Tokens tokens(qkv, shape);
    const int64_t longest = qkv.size(1);
    const at::Tensor output = kept[0].view(tokens.query.sizes());
    const auto [d_query, d_key, d_value] = at::_flash_attention_backward(
        d_output.contiguous().view(output.sizes()), tokens.query, tokens.key, tokens.value, output, kept[1],
        ends, ends, longest, longest, /*dropout_p=*/0.0, /*is_causal=*/true, kept[2], kept[3]);
    return at::cat({d_query, d_key, d_value}, 1).view(qkv.sizes());
  }
};

/// Rotation in place on the packed projection, then attention that computes its probabilities again in
/// backward. `table` is the one of Documents that the kernel reads.
template <typename Kernel>
class DocumentAttention : public Function<DocumentAttention<Kernel>> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& qkv_in,
                            const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine,
                            const at::Tensor& table, const AttentionShape& shape, KeptAttention* kept) {
    const RopeTable rope{cosine.value_or(at::Tensor()), sine.value_or(at::Tensor())};
    at::Tensor qkv = qkv_in.contiguous();
    turn(qkv, shape, rope, 1.0f);
    const variable_list results = kept_or_computed(kept, [&] { return Kernel::forward(qkv, shape, table); });
    variable_list saved = {qkv, rope.cosine, rope.sine, table};
    saved.insert(saved.end(), results.begin(), results.end());
    if (!Kernel::kReadsOutput) saved[4].reset();
    context->save_for_backward(std::move(saved));
    context->saved_data["shape"] = std::vector<int64_t>{shape.heads, shape.kv_heads, shape.head_dim};
    return results[0];
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.attention");
    const variable_list saved = context->get_saved_variables();
    const AttentionShape shape = saved_shape(*context);
    const variable_list kept(saved.begin() + 4, saved.end());
    at::Tensor d_qkv = Kernel::backward(grads[0], saved[0], shape, saved[3], kept);
    turn(d_qkv, shape, {saved[1], saved[2]}, -1.0f);
    return {d_qkv, {}, {}, {}, {}, {}};
  }
};

/// The keys that each query sees, (B, 1, T, T).
at::Tensor mask_of(const at::Tensor& starts) {
  const at::Tensor places = at::arange(starts.size(1), starts.options());
  const at::Tensor queries = places.unsqueeze(-1);
  return (places.ge(starts.unsqueeze(-1)) & places.le(queries)).unsqueeze(1);
}

at::Tensor turned(const at::Tensor& heads, const RopeTable& rope) {
  if (!rope.cosine.defined()) return heads;
  const std::vector<at::Tensor> halves = heads.to(at::kFloat).chunk(2, -1);
  const at::Tensor c = rope.cosine.unsqueeze(1), s = rope.sine.unsqueeze(1);
  return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1).to(heads.scalar_type());
}

/// Attention by ATen's own choice, in differentiable operations.
at::Tensor masked_attention(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                            double dropout, const at::Tensor& starts) {
  const auto [heads, kv_heads, head_dim, kind] = shape;
  const at::Tensor all = qkv.view({qkv.size(0), qkv.size(1), -1, head_dim}).transpose(1, 2);
  const at::Tensor output = at::scaled_dot_product_attention(
      turned(all.narrow(1, 0, heads), rope), turned(all.narrow(1, heads, kv_heads), rope),
      all.narrow(1, heads + kv_heads, kv_heads), mask_of(starts), dropout, false, std::nullopt,
      heads != kv_heads);
  return output.transpose(1, 2).reshape({qkv.size(0), qkv.size(1), heads * head_dim});
}

/// The widest head for which torch's FlashAttention has a backward pass on this GPU; 0: it has none. GPUs of
/// capability 8.0, 9.0 and 10.0 have the shared memory for more than others.
int64_t widest_flash_head() {
  static const int64_t widest = [] {
    const std::vector<kernels::GpuInfo> gpus = kernels::gpus();
    if (gpus.empty() || gpus.front().major < 8) return 0;
    return gpus.front().minor == 0 && gpus.front().major <= 10 ? 256 : 192;
  }();
  return widest;
}
constexpr int64_t kFlashHeadDims = 8;  ///< heads are a multiple of

void check_documents(const at::Tensor& qkv, const Documents& documents) {
  const at::IntArrayRef sizes = documents.starts.sizes();
  TRIREME_CHECK(documents.starts.scalar_type() == at::kInt && documents.starts.is_contiguous() &&
                    sizes == qkv.sizes().slice(0, 2),
                "[nn.attention_in_documents] the starts of documents have shape ({}), but tokens ({}, {}); "
                "give a contiguous int32 number for each token",
                fmt::join(sizes, ", "), qkv.size(0), qkv.size(1));
}

}  // namespace

Documents Documents::to(at::Device device) const {
  if (!are_apart()) return {};
  return {starts.to(device, /*non_blocking=*/true), ends.to(device, /*non_blocking=*/true)};
}

at::Tensor places_in(const Documents& documents) {
  const at::Tensor& starts = documents.starts;
  return (at::arange(starts.size(1), starts.options()) - starts).to(at::kLong);
}

RopeTable rope_in(const Documents& documents, const RopeTable& table) {
  const at::Tensor places = places_in(documents), rows = places.flatten();
  const auto by_token = [&](const at::Tensor& each) {
    return each.index_select(0, rows).view({places.size(0), places.size(1), -1});
  };
  return {by_token(table.cosine), by_token(table.sine)};
}

AttentionBackend document_attention_backend(at::Device device, at::ScalarType dtype, int64_t head_dim,
                                            double dropout) {
  if (dropout > 0.0 || dtype == at::kDouble) return AttentionBackend::kAten;
  if (device.is_cpu()) return AttentionBackend::kCpu;
  const bool fits = dtype != at::kFloat && head_dim % kFlashHeadDims == 0 && head_dim <= widest_flash_head();
  return fits ? AttentionBackend::kFlash : AttentionBackend::kAten;
}

at::Tensor attention_in_documents(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                                  double dropout, KeptAttention* kept, const Documents& documents) {
  if (!documents.are_apart()) return causal_attention(qkv, shape, rope, dropout, kept);
  check_documents(qkv, documents);
  const auto cosine = optional(rope.cosine), sine = optional(rope.sine);
  switch (document_attention_backend(qkv.device(), qkv.scalar_type(), shape.head_dim, dropout)) {
    case AttentionBackend::kCpu:
      return DocumentAttention<OwnDocumentKernel>::apply(qkv, cosine, sine, documents.starts, shape, kept);
    case AttentionBackend::kFlash:
      return DocumentAttention<FlashDocuments>::apply(qkv, cosine, sine, documents.ends, shape, kept);
    default:
      return masked_attention(qkv, shape, rope, dropout, documents.starts);
  }
}

}  // namespace trireme::nn
