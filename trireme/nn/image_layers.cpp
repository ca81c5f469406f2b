#include "trireme/nn/image_layers.h"

#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/batch_norm.h"
#include "trireme/nn/convolution.h"
#include "trireme/nn/group_norm.h"

namespace trireme::nn {
namespace {

constexpr double kEps = 1e-5, kMomentum = 0.1;
constexpr int64_t kCpuVector = 16;  ///< channels that oneDNN takes together

void check_values_per_channel(const at::Tensor& x) {
  if (x.numel() > x.size(1)) return;
  throw ConfigError(
      "[nn.batch_norm] a batch of shape ({}) has one value per channel, but a variance needs at least 2; "
      "raise the micro-batch or the image size, or use another norm",
      fmt::join(x.sizes(), ", "));
}

/// The norm of a batch without samples (0, C, H, W): its parameters get gradients of zero, and there are no
/// statistics.
at::Tensor of_no_samples(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto per_channel = [&](const at::Tensor& param) {
    return param.to(x.scalar_type()).view({1, x.size(1), 1, 1});
  };
  return x * per_channel(weight) + per_channel(bias);
}

/// Whether a norm can be one function with what follows it, of parameters that train, all in one dtype.
bool fits_fused(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const After& after) {
  const bool same = weight.scalar_type() == x.scalar_type() && bias.scalar_type() == x.scalar_type();
  const bool trains = weight.requires_grad() && bias.requires_grad();
  const bool fits = !after.residual.defined() ||
                    (after.residual.sizes() == x.sizes() && after.residual.scalar_type() == x.scalar_type());
  return same && trains && fits;
}

}  // namespace

at::Tensor apply_after(at::Tensor y, const After& after) {
  if (after.residual.defined()) y.add_(after.residual);
  return after.relu ? y.relu_() : y;
}

Conv2d::Conv2d(const Shape& shape) : stride_(shape.stride), padding_(shape.padding) {
  weight =
      register_parameter("weight", at::empty({shape.out, shape.in, shape.kernel, shape.kernel}, at::kFloat));
  if (shape.with_bias) bias = register_parameter("bias", at::empty({shape.out}, at::kFloat));
}

at::Tensor Conv2d::forward(const at::Tensor& x) const {
  // With a stride, oneDNN's gradient of a 1x1 weight writes beyond its memory where channels do not fill
  // whole vectors. A convolution of the positions that the stride leaves has the same values.
  const bool only_skips = weight.size(2) == 1 && weight.size(3) == 1 && stride_ > 1 && padding_ == 0;
  const bool fills_vectors = weight.size(0) % kCpuVector == 0 && weight.size(1) % kCpuVector == 0;
  if (x.is_cpu() && only_skips && !fills_vectors) {
    const auto every = [this](const at::Tensor& whole, int64_t dim) {
      return whole.slice(dim, /*start=*/0, /*end=*/std::nullopt, stride_);
    };
    return at::conv2d(every(every(x, 2), 3), weight, bias);
  }
  if (!bias.defined()) return conv2d(x, weight, stride_, padding_);
  return at::conv2d(x, weight, bias, {stride_, stride_}, {padding_, padding_});
}

BatchNorm::BatchNorm(int64_t channels) {
  weight = register_parameter("weight", at::empty({channels}, at::kFloat));
  bias = register_parameter("bias", at::empty({channels}, at::kFloat));
  running_mean = register_buffer("running_mean", at::zeros({channels}, at::kFloat));
  running_var = register_buffer("running_var", at::ones({channels}, at::kFloat));
  num_batches_tracked = register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
}

at::Tensor BatchNorm::forward(const at::Tensor& x, Statistics statistics, const After& after) {
  if (x.size(0) == 0) return apply_after(of_no_samples(x, weight, bias), after);
  if (is_training() && is_fused(x, after)) {
    check_values_per_channel(x);
    const bool updates = statistics == Statistics::kUpdate;
    return batch_norm(x, weight, bias,
                      {.residual = after.residual,
                       .running_mean = updates ? running_mean : at::Tensor(),
                       .running_var = updates ? running_var : at::Tensor(),
                       .batches = updates ? num_batches_tracked : at::Tensor(),
                       .eps = kEps,
                       .momentum = kMomentum,
                       .relu = after.relu});
  }
  return apply_after(unfused(x, statistics), after);
}

bool BatchNorm::is_fused(const at::Tensor& x, const After& after) const {
  return fits_fused(x, weight, bias, after) && kernels::can_batch_norm(x);
}

at::Tensor BatchNorm::unfused(const at::Tensor& x, Statistics statistics) {
  const at::Tensor wide_weight = weight.to(at::kFloat), wide_bias = bias.to(at::kFloat);
  const auto normed = [&](const at::Tensor& mean, const at::Tensor& variance) {
    return at::batch_norm(x, wide_weight, wide_bias, mean, variance, is_training(), kMomentum, kEps,
                          /*cudnn_enabled=*/true);
  };
  if (!is_training()) return normed(running_mean, running_var);
  check_values_per_channel(x);
  if (statistics == Statistics::kLeave) return normed({}, {});
  num_batches_tracked.add_(1);
  return normed(running_mean, running_var);
}

GroupNorm::GroupNorm(int64_t groups, int64_t channels) : groups_(groups) {
  weight = register_parameter("weight", at::empty({channels}, at::kFloat));
  bias = register_parameter("bias", at::empty({channels}, at::kFloat));
}

at::Tensor GroupNorm::forward(const at::Tensor& x, const After& after) const {
  if (x.size(0) == 0) return apply_after(of_no_samples(x, weight, bias), after);
  if (fits_fused(x, weight, bias, after) && kernels::can_group_norm(x)) {
    return group_norm(x, weight, bias,
                      {.groups = groups_, .residual = after.residual, .eps = kEps, .relu = after.relu});
  }
  // Torch's backward on a CPU writes the gradient of a channels-last input even where it made none: a crash.
  const at::Tensor y = at::group_norm(x.is_cpu() ? x.contiguous() : x, groups_, weight.to(x.scalar_type()),
                                      bias.to(x.scalar_type()), kEps,
                                      /*cudnn_enabled=*/true);
  return apply_after(y, after);
}

NormMaker batch_norms() {
  return [](int64_t channels) -> NormLayer {
    const auto norm = std::make_shared<BatchNorm>(channels);
    return {norm, [norm](const at::Tensor& x, Statistics statistics, const After& after) {
              return norm->forward(x, statistics, after);
            }};
  };
}

NormMaker group_norms(int64_t groups) {
  return [groups](int64_t channels) -> NormLayer {
    const auto norm = std::make_shared<GroupNorm>(groups, channels);
    return {norm,
            [norm](const at::Tensor& x, Statistics, const After& after) { return norm->forward(x, after); }};
  };
}

}  // namespace trireme::nn
