#include "trireme/nn/loss.h"

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "trireme/base/round_up.h"
#include "trireme/kernels/cross_entropy.h"
#include "trireme/kernels/matmul.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"
#include "trireme/nn/linear_parts.h"

namespace trireme::nn {
namespace {

using kernels::Fp8Copy;
using kernels::Fp8Scaling;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Rows of a logits buffer start at multiples of this many elements, and parts have as many rows: cuBLAS is
/// faster so, and FP8 casts blocks.
int64_t alignment_of(const std::optional<Fp8Recipe>& fp8) {
  constexpr int64_t kAligned = 64;
  return fp8 ? std::max(kAligned, kernels::fp8_multiple(fp8->scaling)) : kAligned;
}

/// Rows that count, as an fp32 scalar on the device, so that the host need not wait for it.
at::Tensor kept_rows(const at::Tensor& targets) {
  return targets.ne(kernels::kIgnoredTarget).sum(at::kFloat);
}

/// sum / kept as a factor of gradients. Where no row is kept they are zero and stay so.
at::Tensor per_kept(const at::Tensor& sum, const at::Tensor& kept) {
  return sum / kept.clamp_min(1.0);
}

/// Backward scales the gradients that forward left where they lie: a second pass would scale them again.
void spend_gradients(AutogradContext& context, std::string_view function) {
  if (context.saved_data.count("spent") != 0) {
    throw LogicError(
        "[{}] backward was called twice on one loss, but the first call consumed its gradient; compute the "
        "loss again, or call backward once on the sum",
        function);
  }
  context.saved_data["spent"] = true;
}

class CrossEntropyFunction : public Function<CrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits_in, const at::Tensor& targets,
                            bool want_gradient) {
    const at::Tensor logits = logits_in.contiguous();
    const InUse in_use{logits};
    at::Tensor rows = logits.view({-1, logits.size(-1)});
    at::Tensor loss = at::empty({rows.size(0)}, logits.options().dtype(at::kFloat));
    kernels::cross_entropy(loss, rows, targets, 1.0, want_gradient);
    const at::Tensor kept = kept_rows(targets);
    context->save_for_backward({logits, kept});
    return loss.sum() / kept;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.cross_entropy");
    spend_gradients(*context, "nn.cross_entropy");
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

/// Logits and loss of a part of the rows, and gradients of what was multiplied, by a weight (V', D) whose
/// first `classes` rows are classes and the others zero.
class Head {
 public:
  /// No gradient of a logit is larger than `scale`.
  Head(int64_t classes, double scale) : classes_(classes), scale_(scale) {}
  virtual ~Head() = default;

  /// in (n, D) -> scores (n, V'), loss (n)
  virtual void loss(at::Tensor& loss, at::Tensor& scores, const at::Tensor& in, const at::Tensor& targets,
                    bool want_gradient) = 0;
  /// Gradients for the rows that loss() had last: writes d_in (n, D), and adds to d_weight (V', D), which it
  /// overwrites for the first part; undefined: the weight is not trained.
  virtual void gradients(at::Tensor& d_in, at::Tensor& d_weight, const at::Tensor& scores,
                         const at::Tensor& in, bool is_first) = 0;

 protected:
  /// Gradients of the logits go over them.
  void cross_entropy(at::Tensor& loss, const at::Tensor& scores, const at::Tensor& targets,
                     bool want_gradient) const {
    at::Tensor logits = scores.narrow(1, 0, classes_);
    kernels::cross_entropy(loss, logits, targets, scale_, want_gradient);
  }
  int64_t classes() const { return classes_; }
  double scale() const { return scale_; }

 private:
  int64_t classes_;
  double scale_;
};

class PlainHead final : public Head {
 public:
  PlainHead(at::Tensor weight, int64_t classes, double scale)
      : Head(classes, scale), weight_(std::move(weight)) {}

  void loss(at::Tensor& loss, at::Tensor& scores, const at::Tensor& in, const at::Tensor& targets,
            bool want_gradient) override {
    kernels::matmul(scores, in, weight_.t());
    cross_entropy(loss, scores, targets, want_gradient);
  }
  void gradients(at::Tensor& d_in, at::Tensor& d_weight, const at::Tensor& scores, const at::Tensor& in,
                 bool is_first) override {
    kernels::matmul(d_in, scores, weight_);
    if (d_weight.defined()) kernels::matmul(d_weight, scores.t(), in, {}, is_first ? at::Tensor() : d_weight);
  }

 private:
  at::Tensor weight_;
};

class Fp8Head final : public Head {
 public:
  Fp8Head(const at::Tensor& weight, int64_t classes, double scale, const Fp8Recipe& recipe,
          bool want_gradient)
      : Head(classes, scale), recipe_(recipe), wanted_(want_gradient ? Fp8Copy::kBoth : Fp8Copy::kPlain) {
    weight_ = kernels::fp8_cast(weight, kernels::fp8_amax(weight, recipe.scaling),
                                {.scaling = recipe.scaling, .weight = true}, wanted_);
  }

  void loss(at::Tensor& loss, at::Tensor& scores, const at::Tensor& in, const at::Tensor& targets,
            bool want_gradient) override {
    in_ =
        kernels::fp8_cast(in, kernels::fp8_amax(in, recipe_.scaling), {.scaling = recipe_.scaling}, wanted_);
    kernels::fp8_matmul(scores, in_.plain, weight_.plain, recipe_.fast_forward);
    if (want_gradient && recipe_.scaling == Fp8Scaling::kTensor) {
      d_scores_ = kernels::fp8_cross_entropy(loss, scores, classes(), targets, scale());
      return;
    }
    cross_entropy(loss, scores, targets, want_gradient);
    if (!want_gradient) return;
    d_scores_ = kernels::fp8_cast(scores, amax_of_gradients(scores),
                                  {.scaling = recipe_.scaling, .format = kernels::Fp8Format::kE5m2});
  }
  void gradients(at::Tensor& d_in, at::Tensor& d_weight, const at::Tensor&, const at::Tensor&,
                 bool is_first) override {
    kernels::fp8_matmul(d_in, d_scores_.plain, weight_.transposed, /*fast=*/false);
    if (!d_weight.defined()) return;
    kernels::fp8_matmul(d_weight, d_scores_.transposed, in_.transposed, recipe_.fast_backward, {},
                        is_first ? at::Tensor() : d_weight);
  }

 private:
  /// The result of fp8_amax() as if every row and column had the largest gradient.
  at::Tensor amax_of_gradients(const at::Tensor& scores) const {
    if (recipe_.scaling == Fp8Scaling::kBlock) return {};
    return at::full({scores.size(0) + scores.size(1)}, scale(), scores.options().dtype(at::kFloat));
  }

  Fp8Recipe recipe_;
  Fp8Copy wanted_;
  kernels::Fp8Copies weight_, in_, d_scores_;
};

class LinearCrossEntropyFunction : public Function<LinearCrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& targets, int64_t chunk_bytes, double gradient_scale,
                            const std::optional<Fp8Recipe>& fp8, bool want_gradient) {
    const at::Tensor rows = as_rows(x).contiguous(), wanted = targets.reshape({-1});
    const InUse in_use{rows, weight};
    const int64_t alignment = alignment_of(fp8);
    const int64_t count = rows.size(0), classes = weight.size(0), stride = round_up(classes, alignment);
    const int64_t row_bytes = stride * static_cast<int64_t>(x.element_size());
    const int64_t chunk = std::clamp<int64_t>(chunk_bytes / row_bytes / alignment * alignment, alignment,
                                              std::max(count, alignment));
    const at::Tensor buffer = at::empty({std::min(chunk, count), stride}, x.options());
    const at::Tensor aligned_weight = padded(weight, stride);  // as the logits are
    const double scale = gradient_scale / static_cast<double>(count);
    std::unique_ptr<Head> head = std::make_unique<PlainHead>(aligned_weight, classes, scale);
    if (fp8) head = std::make_unique<Fp8Head>(aligned_weight, classes, scale, *fp8, want_gradient);
    at::Tensor loss = at::empty({count}, x.options().dtype(at::kFloat));
    at::Tensor d_rows = want_gradient ? at::empty_like(rows) : at::Tensor();
    const bool trains = want_gradient && weight.requires_grad();
    at::Tensor d_weight = trains ? at::empty_like(aligned_weight) : at::Tensor();
    if (trains && count == 0) d_weight.zero_();  // there is no part that would write it
    for (int64_t first = 0; first < count; first += chunk) {
      const int64_t part = std::min(chunk, count - first);
      const at::Tensor in = rows.narrow(0, first, part);
      at::Tensor scores = buffer.narrow(0, 0, part);
      at::Tensor part_loss = loss.narrow(0, first, part);
      head->loss(part_loss, scores, in, wanted.narrow(0, first, part), want_gradient);
      if (!want_gradient) continue;
      at::Tensor d_in = d_rows.narrow(0, first, part);
      head->gradients(d_in, d_weight, scores, in, first == 0);
    }
    const at::Tensor kept = kept_rows(wanted);
    const at::Tensor all = at::full({}, static_cast<double>(count), kept.options());
    context->save_for_backward(
        {weight, d_rows, trains ? d_weight.narrow(0, 0, classes) : d_weight, per_kept(all, kept)});
    context->saved_data["shape"] = x.sizes().vec();
    context->saved_data["scale"] = gradient_scale;
    return loss.sum() / kept;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.linear_cross_entropy");
    spend_gradients(*context, "nn.linear_cross_entropy");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& weight = saved[0];
    at::Tensor d_rows = saved[1], d_weight = saved[2];
    const at::Tensor& rows_per_kept = saved[3];
    const at::Tensor factor = grads[0] * rows_per_kept / context->saved_data["scale"].toDouble();
    variable_list result(7);
    kernels::scale(d_rows, d_rows, factor);
    result[0] = d_rows.view(context->saved_data["shape"].toIntVector());
    if (!d_weight.defined() || !is_reached(weight)) return result;
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
  TRIREME_CHECK(rows.numel() / rows.size(-1) == targets.numel(),
                "[nn.cross_entropy] {} rows but {} targets; each row needs one target",
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
