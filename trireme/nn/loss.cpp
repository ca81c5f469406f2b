#include "trireme/nn/loss.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "trireme/kernels/cross_entropy.h"
#include "trireme/kernels/matmul.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"
#include "trireme/nn/linear_parts.h"

namespace trireme::nn {
namespace {

using kernels::Fp8Copy;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Rows of a logits buffer start at multiples of this many elements, and parts have as many rows: cuBLAS is
/// faster so, and FP8 casts blocks.
int64_t alignment_of(const std::optional<Fp8Recipe>& fp8) {
  constexpr int64_t kAligned = 64;
  return fp8 ? std::max(kAligned, kernels::fp8_multiple(fp8->scaling)) : kAligned;
}

int64_t aligned(int64_t count, int64_t alignment) {
  return (count + alignment - 1) / alignment * alignment;
}

/// Rows that count, as an fp32 scalar on the device, so that the host need not wait for it.
at::Tensor kept_rows(const at::Tensor& targets) {
  return targets.ne(kernels::kIgnoredTarget).sum(at::kFloat);
}

/// sum / kept as a factor of gradients. Where no row is kept they are zero and stay so.
at::Tensor per_kept(const at::Tensor& sum, const at::Tensor& kept) {
  return sum / kept.clamp_min(1.0);
}

class CrossEntropyFunction : public Function<CrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits_in, const at::Tensor& targets,
                            bool want_gradient) {
    const at::Tensor logits = logits_in.contiguous();
    at::Tensor rows = logits.view({-1, logits.size(-1)});
    at::Tensor loss = at::empty({rows.size(0)}, logits.options().dtype(at::kFloat));
    kernels::cross_entropy(loss, rows, targets, 1.0, want_gradient);
    const at::Tensor kept = kept_rows(targets);
    context->save_for_backward({logits, kept});
    return loss.sum() / kept;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    at::Tensor gradient = saved[0];
    kernels::scale(gradient, gradient, per_kept(grads[0], saved[1]));
    return {gradient, at::Tensor(), at::Tensor()};
  }
};

/// (V, D) with rows of zeros up to `rows`; itself when it has them.
at::Tensor padded(const at::Tensor& weight, int64_t rows) {
  if (weight.size(0) == rows) return weight;
  at::Tensor result = at::empty({rows, weight.size(1)}, weight.options());
  result.narrow(0, 0, weight.size(0)).copy_(weight);
  result.narrow(0, weight.size(0), rows - weight.size(0)).zero_();
  return result;
}

/// The products of a head's weight (V, D): logits = in @ weight^T and, from their gradients, those of in and
/// of the weight.
class HeadProducts {
 public:
  virtual ~HeadProducts() = default;
  /// in (n, D) -> scores (n, V)
  virtual void logits(at::Tensor& scores, const at::Tensor& in) = 0;
  /// Of the part that logits() computed last: d_scores (n, V) -> d_in (n, D), and d_weight (V, D), of which
  /// the first part is not there yet.
  virtual void gradients(const at::Tensor& d_scores, const at::Tensor& in, at::Tensor& d_in,
                         at::Tensor& d_weight, bool is_first) = 0;
};

class PlainHead final : public HeadProducts {
 public:
  explicit PlainHead(at::Tensor weight) : weight_(std::move(weight)) {}

  void logits(at::Tensor& scores, const at::Tensor& in) override { kernels::matmul(scores, in, weight_.t()); }
  void gradients(const at::Tensor& d_scores, const at::Tensor& in, at::Tensor& d_in, at::Tensor& d_weight,
                 bool is_first) override {
    kernels::matmul(d_in, d_scores, weight_);
    kernels::matmul(d_weight, d_scores.t(), in, {}, is_first ? at::Tensor() : d_weight);
  }

 private:
  at::Tensor weight_;
};

class Fp8Head final : public HeadProducts {
 public:
  /// No gradient of a logit is larger than `largest`.
  Fp8Head(const at::Tensor& weight, const Fp8Recipe& recipe, double largest, bool want_gradient)
      : recipe_(recipe), largest_(largest), copies_(want_gradient ? Fp8Copy::kBoth : Fp8Copy::kPlain) {
    weight_ = kernels::fp8_cast(weight, kernels::fp8_amax(weight, recipe.scaling),
                                {.scaling = recipe.scaling, .weight = true}, copies_);
  }

  void logits(at::Tensor& scores, const at::Tensor& in) override {
    in_ =
        kernels::fp8_cast(in, kernels::fp8_amax(in, recipe_.scaling), {.scaling = recipe_.scaling}, copies_);
    kernels::fp8_matmul(scores, in_.plain, weight_.plain, recipe_.fast_forward);
  }
  void gradients(const at::Tensor& d_scores, const at::Tensor&, at::Tensor& d_in, at::Tensor& d_weight,
                 bool is_first) override {
    const kernels::Fp8Copies cast = kernels::fp8_cast(
        d_scores, amax_of(d_scores), {.scaling = recipe_.scaling, .format = kernels::Fp8Format::kE5m2});
    kernels::fp8_matmul(d_in, cast.plain, weight_.transposed, false);
    kernels::fp8_matmul(d_weight, cast.transposed, in_.transposed, recipe_.fast_backward, {},
                        is_first ? at::Tensor() : d_weight);
  }

 private:
  /// As fp8_amax() would find it, were every row to reach the largest.
  at::Tensor amax_of(const at::Tensor& d_scores) const {
    if (recipe_.scaling == kernels::Fp8Scaling::kBlock) return {};
    const bool by_rows = recipe_.scaling == kernels::Fp8Scaling::kRow;
    return at::full({by_rows ? d_scores.size(0) + d_scores.size(1) : 1}, largest_,
                    d_scores.options().dtype(at::kFloat));
  }

  Fp8Recipe recipe_;
  double largest_;
  Fp8Copy copies_;
  kernels::Fp8Copies weight_, in_;
};

std::unique_ptr<HeadProducts> products_of(const at::Tensor& weight, const std::optional<Fp8Recipe>& fp8,
                                          double largest, bool want_gradient) {
  if (fp8) return std::make_unique<Fp8Head>(weight, *fp8, largest, want_gradient);
  return std::make_unique<PlainHead>(weight);
}

class LinearCrossEntropyFunction : public Function<LinearCrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& targets, int64_t chunk_bytes, double gradient_scale,
                            const std::optional<Fp8Recipe>& fp8, bool want_gradient) {
    const at::Tensor rows = as_rows(x).contiguous(), wanted = targets.reshape({-1});
    const int64_t alignment = alignment_of(fp8);
    const int64_t count = rows.size(0), classes = weight.size(0), stride = aligned(classes, alignment);
    const int64_t row_bytes = stride * static_cast<int64_t>(x.element_size());
    const int64_t chunk = std::clamp<int64_t>(chunk_bytes / row_bytes / alignment * alignment, alignment,
                                              std::max(count, alignment));
    const at::Tensor buffer = at::empty({std::min(chunk, count), stride}, x.options());
    const at::Tensor head = padded(weight, stride);  // aligned as the logits are
    const double factor = gradient_scale / static_cast<double>(count);
    const auto products = products_of(head, fp8, factor, want_gradient);
    at::Tensor loss = at::empty({count}, x.options().dtype(at::kFloat));
    at::Tensor d_rows = want_gradient ? at::empty_like(rows) : at::Tensor();
    at::Tensor d_head = want_gradient ? at::empty_like(head) : at::Tensor();
    for (int64_t first = 0; first < count; first += chunk) {
      const int64_t part = std::min(chunk, count - first);
      const at::Tensor in = rows.narrow(0, first, part);
      at::Tensor scores = buffer.narrow(0, 0, part);
      at::Tensor logits = scores.narrow(1, 0, classes);
      at::Tensor part_loss = loss.narrow(0, first, part);
      products->logits(scores, in);
      kernels::cross_entropy(part_loss, logits, wanted.narrow(0, first, part), factor, want_gradient);
      if (!want_gradient) continue;
      at::Tensor d_in = d_rows.narrow(0, first, part);
      products->gradients(scores, in, d_in, d_head, first == 0);
    }
    const at::Tensor kept = kept_rows(wanted);
    const at::Tensor all = at::full({}, static_cast<double>(count), kept.options());
    context->save_for_backward(
        {weight, d_rows, want_gradient ? d_head.narrow(0, 0, classes) : d_head, per_kept(all, kept)});
    context->saved_data["shape"] = x.sizes().vec();
    context->saved_data["scale"] = gradient_scale;
    return loss.sum() / kept;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& weight = saved[0];
    at::Tensor d_rows = saved[1], d_weight = saved[2];
    const at::Tensor& rows_per_kept = saved[3];
    const at::Tensor factor = grads[0] * rows_per_kept / context->saved_data["scale"].toDouble();
    variable_list result(7);
    kernels::scale(d_rows, d_rows, factor);
    result[0] = d_rows.view(context->saved_data["shape"].toIntVector());
    if (!weight.requires_grad()) return result;
    at::Tensor into = gradient_to_add_to(weight);
    if (into.defined()) {
      kernels::add_scaled(into, d_weight, factor);
    } else if (at::Tensor first = claim_gradient(weight); first.defined()) {
      kernels::scale(first, d_weight, factor);
    } else {
      kernels::scale(d_weight, d_weight, factor);
      result[1] = d_weight;
    }
    return result;
  }
};

void check_targets(const at::Tensor& rows, const at::Tensor& targets) {
  TRIREME_CHECK(rows.numel() / rows.size(-1) == targets.numel(), "[nn.cross_entropy] {} rows, {} targets",
                rows.numel() / rows.size(-1), targets.numel());
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  check_targets(logits, targets);
  const bool want_gradient = logits.requires_grad() && at::GradMode::is_enabled();
  return CrossEntropyFunction::apply(logits, targets.contiguous(), want_gradient);
}

at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                int64_t chunk_bytes, double gradient_scale,
                                const std::optional<Fp8Recipe>& fp8) {
  check_targets(x, targets);
  const bool want_gradient = (x.requires_grad() || weight.requires_grad()) && at::GradMode::is_enabled();
  return LinearCrossEntropyFunction::apply(x, weight, targets.contiguous(), chunk_bytes, gradient_scale, fp8,
                                           want_gradient);
}

}  // namespace trireme::nn
