#include "trireme/parallel/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <numeric>
#include <tuple>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/nn/autograd.h"
#include "trireme/parallel/kept_group.h"

namespace trireme::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

int64_t values_per_channel(const at::Tensor& x) {
  return x.numel() / x.size(1);
}

/// Every dimension but that of the channels.
std::vector<int64_t> sample_dims(const at::Tensor& x) {
  std::vector<int64_t> dims(static_cast<size_t>(x.dim()) - 1);
  std::iota(dims.begin() + 1, dims.end(), 2);
  return dims;
}

/// (C) -> (1, C, 1, ...), so that it broadcasts over x.
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& x) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

/// Parameters may be bf16 or fp16 where statistics are not.
at::Tensor as_float(const at::Tensor& values) {
  return values.defined() ? values.to(at::kFloat) : values;
}

// On a GPU each of these four is one fused kernel of ATen, which wants x dense. Those are for GPUs only;
// elsewhere elementary operators serve, with x centred before it is scaled, which keeps its digits when the
// mean is large.

/// {mean, biased variance} over this rank's samples, at least one: (C) fp32.
std::pair<at::Tensor, at::Tensor> local_mean_and_variance(const at::Tensor& x) {
  if (x.is_cuda()) {
    auto [mean, variance] = at::batch_norm_update_stats(x, {}, {}, /*momentum=*/0.0);
    return {mean, variance};
  }
  auto [variance, mean] = at::var_mean(x.to(at::kFloat), sample_dims(x), /*correction=*/0);
  return {mean, variance};
}

/// (x - mean) * rstd * weight + bias in x's dtype.
at::Tensor normalise(const at::Tensor& x, const at::Tensor& mean, const at::Tensor& rstd,
                     const at::Tensor& weight, const at::Tensor& bias) {
  if (x.numel() == 0) return at::empty_like(x);
  if (x.is_cuda())
    return at::batch_norm_elemt(x, nn::optional(weight), nn::optional(bias), mean, rstd, /*eps=*/0.0);
  at::Tensor y = x - per_channel(mean, x);
  y.mul_(per_channel(weight.defined() ? rstd * weight : rstd, x));
  if (bias.defined()) y.add_(per_channel(bias, x));
  return y.to(x.scalar_type());
}

/// Channels are the innermost dimension: x is (N, C), or (N, C, ...) in a channels-last layout.
bool channels_last(const at::Tensor& x) {
  return x.stride(1) == 1;
}

/// {sum(dy), sum(dy * (x - mean))} over this rank's samples: (2, C) fp32.
at::Tensor local_gradient_sums(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean,
                               const at::Tensor& rstd) {
  if (x.numel() == 0) return at::zeros({2, x.size(1)}, mean.options());
  // In other layouts than channels last ATen's kernel rounds partial sums to the dtype of dy.
  if (x.is_cuda() && (x.scalar_type() == at::kFloat || channels_last(x))) {
    const auto sums = at::batch_norm_backward_reduce(dy, x, mean, rstd, {}, /*input_g=*/true,
                                                     /*weight_g=*/false, /*bias_g=*/false);
    return at::stack({std::get<0>(sums), std::get<1>(sums)});
  }
  const auto dims = sample_dims(x);
  at::Tensor centred = x - per_channel(mean, x);
  return at::stack({dy.sum(dims, /*keepdim=*/false, at::kFloat), centred.mul_(dy).sum(dims)});
}

/// (dy - mean(dy) - xhat * mean(dy * xhat)) * rstd * weight, with means over all ranks' samples, in x's
/// dtype. `sums` (2, C) and `counts`, by rank, are of all ranks.
at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean,
                          const at::Tensor& rstd, const at::Tensor& weight, const at::Tensor& sums,
                          const at::Tensor& counts) {
  if (x.numel() == 0) return at::empty_like(x);
  if (x.is_cuda()) {
    return at::batch_norm_backward_elemt(dy, x, mean, rstd, nn::optional(weight), sums[0], sums[1],
                                         counts.to(at::kInt));
  }
  const at::Tensor means = sums / counts.sum();
  at::Tensor dx = x - per_channel(mean, x);
  dx.mul_(per_channel(rstd.square() * means[1], x)).neg_().add_(dy).sub_(per_channel(means[0], x));
  return dx.mul_(per_channel(weight.defined() ? rstd * weight : rstd, x)).to(x.scalar_type());
}

/// What samples of all ranks are normalised with.
struct Statistics {
  at::Tensor mean, rstd;  ///< (C) fp32
  at::Tensor counts;      ///< values per channel, by rank: (n) fp64
};

/// Differentiates through the statistics as functions of all ranks' x.
class NormaliseFunction : public Function<NormaliseFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& weight_in,
                            const std::optional<at::Tensor>& bias_in, const Statistics& statistics,
                            const std::shared_ptr<comm::Group>& group) {
    const at::Tensor weight = weight_in.value_or(at::Tensor()), bias = bias_in.value_or(at::Tensor());
    context->save_for_backward({x, weight, bias, statistics.mean, statistics.rstd, statistics.counts});
    keep_group(*context, group);
    return normalise(x, statistics.mean, statistics.rstd, as_float(weight), as_float(bias));
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    nn::refuse_create_graph("parallel.sync_batch_norm");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    const at::Tensor &mean = saved[3], &rstd = saved[4], &counts = saved[5];
    const at::Tensor dy = grads[0].contiguous(x.suggest_memory_format());
    const at::Tensor sums = local_gradient_sums(dy, x, mean, rstd);

    variable_list result(5);
    if (context->needs_input_grad(0)) {
      result[0] =
          input_gradient(dy, x, mean, rstd, as_float(weight), summed_over_ranks(*context, sums), counts);
    }
    if (weight.defined()) result[1] = (sums[1] * rstd).to(weight.scalar_type());
    if (bias.defined()) result[2] = sums[0].to(bias.scalar_type());
    return result;
  }

 private:
  static at::Tensor summed_over_ranks(AutogradContext& context, const at::Tensor& sums) {
    comm::Group& group = kept_group(context);
    const comm::Subject subject(group, "gradients of SyncBatchNorm");
    at::Tensor all = sums.clone();
    group.all_reduce(all, comm::ReduceOp::kSum);
    return all;
  }
};

/// {mean, M2, count} of this rank's samples: (2C + 1) fp64. M2 is the sum of squared deviations from the
/// mean.
at::Tensor local_moments(const at::Tensor& x) {
  const int64_t count = values_per_channel(x);
  const auto fp64 = x.options().dtype(at::kDouble);
  if (count == 0) return at::zeros({2 * x.size(1) + 1}, fp64);
  const auto [mean, variance] = local_mean_and_variance(x);
  return at::cat({mean.to(fp64), variance.to(fp64) * count, at::full({1}, count, fp64)});
}

void mix_in(at::Tensor& running, const at::Tensor& newest, const at::Tensor& factor) {
  running.add_((newest - running) * factor);
}

}  // namespace

/// Of all ranks' samples, fp64.
struct SyncBatchNorm::Moments {
  at::Tensor mean, m2;       ///< (C)
  at::Tensor counts, count;  ///< values per channel: by rank, and their sum

  at::Tensor rstd(double eps) const { return (m2 / count + eps).rsqrt(); }
  at::Tensor unbiased_variance() const { return m2 / (count - 1); }
};

SyncBatchNorm::SyncBatchNorm(int64_t features, std::shared_ptr<comm::Group> group,
                             const SyncBatchNormOptions& options)
    : features_(features), group_(std::move(group)), options_(options) {
  if (features < 1) {
    throw LogicError("[parallel.sync_batch_norm] features is {}; pass the number of channels, at least 1",
                     features);
  }
  if (!group_) {
    throw LogicError(
        "[parallel.sync_batch_norm] there is no group for {} channels; pass the ranks that share a batch, "
        "such as Mesh::dp",
        features);
  }
  if (!(options.eps >= 0.0)) {
    throw LogicError("[parallel.sync_batch_norm] eps is {}; pass a small number, at least 0", options.eps);
  }
  if (options.momentum && !(*options.momentum >= 0.0 && *options.momentum <= 1.0)) {
    throw LogicError(
        "[parallel.sync_batch_norm] momentum is {}; pass the weight of the newest batch, from 0 to 1, or "
        "nothing to weight all batches equally",
        *options.momentum);
  }
  if (options.affine) {
    weight = register_parameter("weight", at::ones({features}));
    bias = register_parameter("bias", at::zeros({features}));
  }
  if (options.track_running_stats) {
    running_mean = register_buffer("running_mean", at::zeros({features}));
    running_var = register_buffer("running_var", at::ones({features}));
    num_batches_tracked = register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
  }
}

at::Tensor SyncBatchNorm::forward(const at::Tensor& x_in, bool updates) {
  check_input(x_in);
  if (!is_training()) return evaluate(x_in);
  const at::Tensor x = x_in.contiguous(x_in.suggest_memory_format());
  const Moments moments = gather_moments(x);
  check_count(x, moments);
  if (options_.track_running_stats && updates) update_running_statistics(moments);
  const Statistics statistics = {moments.mean.to(at::kFloat), moments.rstd(options_.eps).to(at::kFloat),
                                 moments.counts};
  return NormaliseFunction::apply(x, nn::optional(weight), nn::optional(bias), statistics, group_);
}

void SyncBatchNorm::check_input(const at::Tensor& x) const {
  if (x.dim() < 2 || x.size(1) != features_) {
    throw LogicError("[parallel.sync_batch_norm] x has shape ({}), but must have (N, {}) or (N, {}, ...)",
                     fmt::join(x.sizes(), ", "), features_, features_);
  }
  const at::ScalarType dtype = x.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) {
    throw LogicError("[parallel.sync_batch_norm] x of shape ({}) is {}; convert it to fp32, bf16 or fp16",
                     fmt::join(x.sizes(), ", "), c10::toString(dtype));
  }
}

/// The host waits for the sum over ranks only where it may be too small.
void SyncBatchNorm::check_count(const at::Tensor& x, const Moments& moments) const {
  if (values_per_channel(x) > 1) return;
  const auto count = moments.count.item<int64_t>();
  if (count > 1) return;
  throw LogicError(
      "[parallel.sync_batch_norm] the {} ranks of group {} have {} values per channel in all (x is ({}) on "
      "this one), but a variance needs at least 2; use a larger batch, or call eval()",
      group_->size(), group_->name(), count, fmt::join(x.sizes(), ", "));
}

/// Combines the ranks' moments as Chan, Golub and LeVeque (1983) do. All ranks compute the same from the same
/// rows, so they get the same bits.
SyncBatchNorm::Moments SyncBatchNorm::gather_moments(const at::Tensor& x) const {
  const at::NoGradGuard no_grad;
  const at::Tensor mine = local_moments(x.detach());
  at::Tensor rows = at::empty({group_->size(), mine.numel()}, mine.options());
  const comm::Subject subject(*group_, "statistics of SyncBatchNorm");
  group_->all_gather(rows, mine);

  const at::Tensor means = rows.narrow(1, 0, features_);        // (n, C)
  const at::Tensor m2s = rows.narrow(1, features_, features_);  // (n, C)
  const at::Tensor counts = rows.narrow(1, 2 * features_, 1);   // (n, 1)
  const at::Tensor count = counts.sum();
  const at::Tensor mean = (counts * means).sum(0) / count;
  const at::Tensor m2 = (m2s + counts * (means - mean).square()).sum(0);
  return {.mean = mean, .m2 = m2, .counts = counts.flatten(), .count = count};
}

void SyncBatchNorm::update_running_statistics(const Moments& moments) {
  const at::NoGradGuard no_grad;
  num_batches_tracked.add_(1);
  const at::Tensor factor = options_.momentum ? at::scalar_tensor(*options_.momentum, at::kDouble)
                                              : num_batches_tracked.to(at::kDouble).reciprocal();
  mix_in(running_mean, moments.mean, factor);
  mix_in(running_var, moments.unbiased_variance(), factor);
}

at::Tensor SyncBatchNorm::evaluate(const at::Tensor& x) const {
  return at::batch_norm(x, as_float(weight), as_float(bias), as_float(running_mean), as_float(running_var),
                        /*training=*/!options_.track_running_stats, /*momentum=*/0.0, options_.eps,
                        /*cudnn_enabled=*/true);
}

}  // namespace trireme::parallel
