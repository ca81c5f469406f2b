#include "trireme/kernels/tensor_ops.h"

#include <ATen/ATen.h>

#include <limits>

#include "trireme/base/error.h"
#include "trireme/kernels/activation.h"
#include "trireme/kernels/batch_norm.h"
#include "trireme/kernels/cross_entropy.h"
#include "trireme/kernels/cuda_kernels.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/group_norm.h"
#include "trireme/kernels/norm.h"
#include "trireme/kernels/normal.h"
#include "trireme/kernels/range.h"
#include "trireme/kernels/rope.h"

namespace trireme::kernels {
namespace {

cuda::Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return cuda::Dtype::kFloat;
    case at::kBFloat16:
      return cuda::Dtype::kBFloat16;
    case at::kHalf:
      return cuda::Dtype::kHalf;
    default:
      throw LogicError("[kernels] dtype {} has no GPU kernel; use float32, bfloat16 or float16",
                       c10::toString(tensor.scalar_type()));
  }
}

/// Calls body(Scalar{}) with the dtype of `tensor` on a CPU.
template <typename Body>
void on_cpu(const at::Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == at::kFloat) return body(float{});
  if (tensor.scalar_type() == at::kBFloat16) return body(c10::BFloat16{});
  throw LogicError("[kernels] dtype {} has no CPU kernel; use float32 or bfloat16",
                   c10::toString(tensor.scalar_type()));
}

void launched(int error, const char* operation) {
  if (error != 0) throw LogicError("[kernels.{}] launch failed: {}", operation, gpu_error_text(error));
}

const void* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
void* mutable_data(at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}
float* floats(at::Tensor& tensor) {
  return tensor.mutable_data_ptr<float>();
}
const float* floats(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}

/// Where a kernel puts the largest magnitude of what it writes; nullptr: it does not look.
float* found(const at::Tensor& amax) {
  return amax.defined() ? amax.mutable_data_ptr<float>() : nullptr;
}

/// The dtype of the copy of the parameters; where there is none, one that goes with the gradient's.
cuda::Dtype copy_dtype(const at::Tensor& copy, const at::Tensor& grad) {
  return dtype_of(copy.defined() ? copy : grad);
}

/// `step` for a CPU, whose kernels take all factors as one and write copies in bf16 alone.
template <typename Step>
Step step_on_cpu(Step step, const at::Tensor& copy, const at::Tensor& grad_scale) {
  TRIREME_CHECK(!copy.defined() || copy.scalar_type() == at::kBFloat16,
                "[kernels.optimizer] the copy of the parameters is {}, and a CPU updates only copies in "
                "BFloat16; compute in BFloat16 or Float",
                c10::toString(copy.scalar_type()));
  if (grad_scale.defined()) step.grad_scale *= grad_scale.item<float>();
  return step;
}

at::Tensor scratch(const at::Tensor& like, int64_t floats) {
  return at::empty({floats}, like.options().dtype(at::kFloat));
}

/// Whether dtype_of() knows the dtype.
bool has_kernels(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

cuda::ConvWeights conv_weights_of(const at::Tensor& weight) {
  return {.out = weight.size(0), .channels = weight.size(1), .positions = weight.size(2) * weight.size(3)};
}

cuda::MaxPool max_pool_of(const at::Tensor& x, const at::Tensor& y, const PoolWindow& window) {
  return {.images = x.size(0),
          .channels = x.size(1),
          .height = x.size(2),
          .width = x.size(3),
          .out_height = y.size(2),
          .out_width = y.size(3),
          .kernel = window.kernel,
          .stride = window.stride,
          .padding = window.padding};
}

Moments raw(const MomentsOfRange& range) {
  Moments moments{.key = range.key, .first_block = range.first_block};
  for (size_t n = 0; n < range.numbers.size() && n < Moments::kMost; ++n) {
    const Moment& number = range.numbers[n];
    moments.format = number.format();
    moments.values[n] = number.values().mutable_data_ptr();
    if (number.exponents().defined()) moments.exponents[n] = number.exponents().mutable_data_ptr<uint8_t>();
  }
  return moments;
}

struct Rows {
  explicit Rows(const at::Tensor& x) : width(x.size(-1)), count(width == 0 ? 0 : x.numel() / width) {}
  int64_t width, count;
};

/// x + delta where there is a delta; `sum` receives it.
const at::Tensor& summed(at::Tensor& sum, const at::Tensor& x, const at::Tensor& delta) {
  if (!delta.defined()) return x;
  at::add_out(sum, x, delta);
  return sum;
}

}  // namespace

void rms_norm_forward(at::Tensor& y, at::Tensor& sum, at::Tensor& rstd, const at::Tensor& x,
                      const at::Tensor& delta, const at::Tensor& weight, double eps, const at::Tensor& amax) {
  const OperatorRange traced("trireme::rms_norm_forward");
  const Rows rows(x);
  if (x.is_cuda()) {
    return launched(
        cuda::rms_norm_forward(mutable_data(y), mutable_data(sum), floats(rstd), data(x), data(delta),
                               data(weight), rows.count, rows.width, static_cast<float>(eps), dtype_of(x),
                               current_stream(), found(amax)),
        "rms_norm");
  }
  const at::Tensor& in = summed(sum, x, delta);
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    rms_norm_forward(y.data_ptr<Scalar>(), floats(rstd), in.const_data_ptr<Scalar>(),
                     weight.const_data_ptr<Scalar>(), rows.count, rows.width, static_cast<float>(eps));
  });
}

void rms_norm_backward(at::Tensor& dx, at::Tensor& d_weight, const at::Tensor& dy, const at::Tensor& d_sum,
                       const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd,
                       const at::Tensor& amax) {
  const OperatorRange traced("trireme::rms_norm_backward");
  const Rows rows(x);
  if (x.is_cuda()) {
    at::Tensor partial = scratch(x, cuda::norm_scratch(rows.width, 1));
    return launched(
        cuda::rms_norm_backward(mutable_data(dx), mutable_data(d_weight), floats(partial), data(dy),
                                data(d_sum), data(x), data(weight), floats(rstd), rows.count, rows.width,
                                dtype_of(x), current_stream(), found(amax)),
        "rms_norm_backward");
  }
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    rms_norm_backward(dx.data_ptr<Scalar>(), d_weight.data_ptr<Scalar>(), dy.const_data_ptr<Scalar>(),
                      x.const_data_ptr<Scalar>(), weight.const_data_ptr<Scalar>(), floats(rstd), rows.count,
                      rows.width);
  });
  if (d_sum.defined()) dx.add_(d_sum);
}

void layer_norm_forward(at::Tensor& y, at::Tensor& sum, at::Tensor& statistics, const at::Tensor& x,
                        const at::Tensor& delta, const at::Tensor& weight, const at::Tensor& bias, double eps,
                        const at::Tensor& amax) {
  const OperatorRange traced("trireme::layer_norm_forward");
  const Rows rows(x);
  float* const mean = floats(statistics);
  if (x.is_cuda()) {
    return launched(
        cuda::layer_norm_forward(mutable_data(y), mutable_data(sum), mean, mean + rows.count, data(x),
                                 data(delta), data(weight), data(bias), rows.count, rows.width,
                                 static_cast<float>(eps), dtype_of(x), current_stream(), found(amax)),
        "layer_norm");
  }
  const at::Tensor& in = summed(sum, x, delta);
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    layer_norm_forward(y.data_ptr<Scalar>(), mean, mean + rows.count, in.const_data_ptr<Scalar>(),
                       weight.const_data_ptr<Scalar>(), bias.const_data_ptr<Scalar>(), rows.count, rows.width,
                       static_cast<float>(eps));
  });
}

void layer_norm_backward(at::Tensor& dx, at::Tensor& d_weight, at::Tensor& d_bias, const at::Tensor& dy,
                         const at::Tensor& d_sum, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& statistics, const at::Tensor& amax, const at::Tensor& dx_sums) {
  const OperatorRange traced("trireme::layer_norm_backward");
  const Rows rows(x);
  const float* const mean = floats(statistics);
  if (x.is_cuda()) {
    at::Tensor partial = scratch(x, cuda::norm_scratch(rows.width, dx_sums.defined() ? 3 : 2));
    return launched(cuda::layer_norm_backward(mutable_data(dx), mutable_data(d_weight), mutable_data(d_bias),
                                              floats(partial), data(dy), data(d_sum), data(x), data(weight),
                                              mean, mean + rows.count, rows.count, rows.width, dtype_of(x),
                                              current_stream(), found(amax), found(dx_sums)),
                    "layer_norm_backward");
  }
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    layer_norm_backward(dx.data_ptr<Scalar>(), d_weight.data_ptr<Scalar>(), d_bias.data_ptr<Scalar>(),
                        dy.const_data_ptr<Scalar>(), x.const_data_ptr<Scalar>(),
                        weight.const_data_ptr<Scalar>(), mean, mean + rows.count, rows.count, rows.width);
  });
  if (d_sum.defined()) dx.add_(d_sum);
}

bool can_batch_norm(const at::Tensor& x) {
  if (x.dim() != 4 || x.numel() < 2 * x.size(1) || !x.is_contiguous(at::MemoryFormat::ChannelsLast))
    return false;
  if (!x.is_cuda()) return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  const bool counted = x.numel() / x.size(1) <= std::numeric_limits<int32_t>::max();
  return has_kernels(x) && counted && x.size(1) * static_cast<int64_t>(x.element_size()) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

void batch_norm_forward(at::Tensor& y, at::Tensor& statistics, const at::Tensor& x, const at::Tensor& weight,
                        const at::Tensor& bias, const BatchNormCall& call) {
  const OperatorRange traced("trireme::batch_norm_forward");
  const int64_t channels = x.size(1), rows = x.numel() / channels;
  at::Tensor mean = call.running_mean, variance = call.running_var;
  float* const running_mean = mean.defined() ? floats(mean) : nullptr;
  float* const running_var = variance.defined() ? floats(variance) : nullptr;
  at::Tensor batches = call.batches;
  if (x.is_cuda()) {
    at::Tensor partial = scratch(x, cuda::batch_norm_scratch(channels));
    return launched(cuda::batch_norm_forward(
                        {.y = mutable_data(y),
                         .statistics = floats(statistics),
                         .scratch = floats(partial),
                         .running_mean = running_mean,
                         .running_var = running_var,
                         .batches = batches.defined() ? batches.mutable_data_ptr<int64_t>() : nullptr,
                         .x = data(x),
                         .residual = data(call.residual),
                         .weight = data(weight),
                         .bias = data(bias),
                         .rows = rows,
                         .channels = channels,
                         .eps = static_cast<float>(call.eps),
                         .momentum = static_cast<float>(call.momentum),
                         .relu = call.relu},
                        dtype_of(x), current_stream()),
                    "batch_norm");
  }
  if (batches.defined()) batches.add_(1);
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    batch_norm_forward<Scalar>(
        {.y = y.data_ptr<Scalar>(),
         .statistics = floats(statistics),
         .running_mean = running_mean,
         .running_var = running_var,
         .x = x.const_data_ptr<Scalar>(),
         .residual = call.residual.defined() ? call.residual.const_data_ptr<Scalar>() : nullptr,
         .weight = weight.const_data_ptr<Scalar>(),
         .bias = bias.const_data_ptr<Scalar>(),
         .rows = rows,
         .channels = channels,
         .eps = static_cast<float>(call.eps),
         .momentum = static_cast<float>(call.momentum),
         .relu = call.relu});
  });
}

void batch_norm_backward(at::Tensor& dx, at::Tensor& d_residual, const GradientOut& d_weight,
                         const GradientOut& d_bias, const at::Tensor& dy, const at::Tensor& x,
                         const at::Tensor& y, const at::Tensor& weight, const at::Tensor& statistics,
                         bool relu) {
  const OperatorRange traced("trireme::batch_norm_backward");
  const int64_t channels = x.size(1), rows = x.numel() / channels;
  at::Tensor to_weight = d_weight.tensor, to_bias = d_bias.tensor;
  if (x.is_cuda()) {
    at::Tensor partial = scratch(x, cuda::batch_norm_scratch(channels));
    return launched(cuda::batch_norm_backward({.dx = mutable_data(dx),
                                               .d_residual = mutable_data(d_residual),
                                               .d_weight = mutable_data(to_weight),
                                               .d_bias = mutable_data(to_bias),
                                               .scratch = floats(partial),
                                               .dy = data(dy),
                                               .x = data(x),
                                               .y = data(y),
                                               .statistics = floats(statistics),
                                               .rows = rows,
                                               .channels = channels,
                                               .relu = relu,
                                               .adds_to_weight = d_weight.adds,
                                               .adds_to_bias = d_bias.adds},
                                              dtype_of(x), current_stream()),
                    "batch_norm_backward");
  }
  if (!d_weight.adds) to_weight.zero_();
  if (!d_bias.adds) to_bias.zero_();
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    batch_norm_backward<Scalar>({.dx = dx.data_ptr<Scalar>(),
                                 .d_residual = d_residual.defined() ? d_residual.data_ptr<Scalar>() : nullptr,
                                 .d_weight = to_weight.data_ptr<Scalar>(),
                                 .d_bias = to_bias.data_ptr<Scalar>(),
                                 .dy = dy.const_data_ptr<Scalar>(),
                                 .x = x.const_data_ptr<Scalar>(),
                                 .y = y.defined() ? y.const_data_ptr<Scalar>() : nullptr,
                                 .weight = weight.const_data_ptr<Scalar>(),
                                 .statistics = floats(statistics),
                                 .rows = rows,
                                 .channels = channels});
  });
}

bool can_group_norm(const at::Tensor& x) {
  return x.is_cpu() && x.numel() > 0 && x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast) &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
}

void group_norm_forward(at::Tensor& y, at::Tensor& statistics, const at::Tensor& x, const at::Tensor& weight,
                        const at::Tensor& bias, const GroupNormCall& call) {
  const OperatorRange traced("trireme::group_norm_forward");
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    group_norm_forward<Scalar>(
        {.shape = {x.size(0), x.size(2) * x.size(3), x.size(1), call.groups},
         .y = y.data_ptr<Scalar>(),
         .statistics = floats(statistics),
         .x = x.const_data_ptr<Scalar>(),
         .residual = call.residual.defined() ? call.residual.const_data_ptr<Scalar>() : nullptr,
         .weight = weight.const_data_ptr<Scalar>(),
         .bias = bias.const_data_ptr<Scalar>(),
         .eps = static_cast<float>(call.eps),
         .relu = call.relu});
  });
}

void group_norm_backward(at::Tensor& dx, at::Tensor& d_residual, at::Tensor& d_weight, at::Tensor& d_bias,
                         const at::Tensor& dy, const at::Tensor& x, const at::Tensor& y,
                         const at::Tensor& weight, const at::Tensor& statistics) {
  const OperatorRange traced("trireme::group_norm_backward");
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    group_norm_backward<Scalar>({.shape = {x.size(0), x.size(2) * x.size(3), x.size(1), statistics.size(2)},
                                 .dx = dx.data_ptr<Scalar>(),
                                 .d_residual = d_residual.defined() ? d_residual.data_ptr<Scalar>() : nullptr,
                                 .d_weight = d_weight.data_ptr<Scalar>(),
                                 .d_bias = d_bias.data_ptr<Scalar>(),
                                 .dy = dy.const_data_ptr<Scalar>(),
                                 .x = x.const_data_ptr<Scalar>(),
                                 .y = y.defined() ? y.const_data_ptr<Scalar>() : nullptr,
                                 .weight = weight.const_data_ptr<Scalar>(),
                                 .statistics = floats(statistics)});
  });
}

void turn_conv_weights(at::Tensor& turned, const at::Tensor& weight) {
  launched(cuda::turn_conv_weights(mutable_data(turned), data(weight), conv_weights_of(weight),
                                   dtype_of(weight), current_stream()),
           "turn_conv_weights");
}

void add_conv_weights(const GradientOut& to, const at::Tensor& gradient) {
  at::Tensor sum = to.tensor;
  launched(cuda::add_conv_weights(mutable_data(sum), dtype_of(sum), data(gradient), to.adds,
                                  conv_weights_of(gradient), dtype_of(gradient), current_stream()),
           "add_conv_weights");
}

bool can_turn(const at::Tensor& weight) {
  return weight.is_cuda() && weight.dim() == 4 && weight.is_contiguous() && has_kernels(weight) &&
         weight.size(2) * weight.size(3) <= cuda::ConvWeights::kMostPositions;
}

bool can_max_pool(const at::Tensor& x) {
  // The kernels count in 32 bits within an image.
  return x.is_cuda() && x.numel() > 0 && x.numel() / x.size(0) <= std::numeric_limits<int32_t>::max() &&
         can_batch_norm(x);
}

void max_pool_forward(at::Tensor& y, at::Tensor& taken, const at::Tensor& x, const PoolWindow& window) {
  const OperatorRange traced("trireme::max_pool_forward");
  launched(cuda::max_pool_forward(max_pool_of(x, y, window), mutable_data(y),
                                  taken.mutable_data_ptr<uint8_t>(), data(x), dtype_of(x), current_stream()),
           "max_pool");
}

void max_pool_backward(at::Tensor& dx, const at::Tensor& dy, const at::Tensor& taken,
                       const PoolWindow& window) {
  const OperatorRange traced("trireme::max_pool_backward");
  launched(cuda::max_pool_backward(max_pool_of(dx, dy, window), mutable_data(dx), data(dy),
                                   taken.const_data_ptr<uint8_t>(), dtype_of(dx), current_stream()),
           "max_pool_backward");
}

void add_column_sums(at::Tensor& total, const at::Tensor& x) {
  const OperatorRange traced("trireme::add_column_sums");
  if (!x.is_cuda()) {
    total.add_(x.sum(0));
    return;
  }
  if (x.numel() == 0) return;
  const Rows rows(x);
  at::Tensor partial = scratch(x, cuda::column_scratch(rows.width));
  launched(cuda::add_column_sums(mutable_data(total), floats(partial), data(x), rows.count, rows.width,
                                 dtype_of(x), current_stream()),
           "add_column_sums");
}

void swiglu_forward(at::Tensor& y, const at::Tensor& gate_up, const at::Tensor& amax) {
  const OperatorRange traced("trireme::swiglu_forward");
  const Rows rows(y);
  if (y.is_cuda()) {
    return launched(cuda::swiglu_forward(mutable_data(y), data(gate_up), rows.count, rows.width, dtype_of(y),
                                         current_stream(), found(amax)),
                    "swiglu");
  }
  on_cpu(y, [&](auto scalar) {
    using Scalar = decltype(scalar);
    swiglu_forward(y.data_ptr<Scalar>(), gate_up.const_data_ptr<Scalar>(), rows.count, rows.width);
  });
}

void swiglu_backward(at::Tensor& d_gate_up, const at::Tensor& dy, const at::Tensor& gate_up,
                     const at::Tensor& amax, at::Tensor y) {
  const OperatorRange traced("trireme::swiglu_backward");
  const Rows rows(dy);
  if (dy.is_cuda()) {
    return launched(
        cuda::swiglu_backward(mutable_data(d_gate_up), data(dy), data(gate_up), rows.count, rows.width,
                              dtype_of(dy), current_stream(), found(amax), mutable_data(y)),
        "swiglu_backward");
  }
  if (y.defined()) swiglu_forward(y, gate_up);
  on_cpu(dy, [&](auto scalar) {
    using Scalar = decltype(scalar);
    swiglu_backward(d_gate_up.data_ptr<Scalar>(), dy.const_data_ptr<Scalar>(),
                    gate_up.const_data_ptr<Scalar>(), rows.count, rows.width);
  });
}

void gelu_forward(at::Tensor& y, const at::Tensor& x, const at::Tensor& amax) {
  const OperatorRange traced("trireme::gelu_forward");
  if (x.is_cuda()) {
    return launched(
        cuda::gelu_forward(mutable_data(y), data(x), x.numel(), dtype_of(x), current_stream(), found(amax)),
        "gelu");
  }
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    gelu_forward(y.data_ptr<Scalar>(), x.const_data_ptr<Scalar>(), x.numel());
  });
}

void gelu_backward(at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& amax,
                   at::Tensor y, const at::Tensor& dx_sums) {
  const OperatorRange traced("trireme::gelu_backward");
  if (x.is_cuda() && dx_sums.defined()) {
    const Rows rows(x);
    at::Tensor partial = scratch(x, cuda::column_scratch(rows.width));
    return launched(cuda::gelu_backward_with_sums(mutable_data(dx), found(dx_sums), floats(partial), data(dy),
                                                  data(x), rows.count, rows.width, dtype_of(x),
                                                  current_stream(), found(amax), mutable_data(y)),
                    "gelu_backward");
  }
  if (x.is_cuda()) {
    return launched(cuda::gelu_backward(mutable_data(dx), data(dy), data(x), x.numel(), dtype_of(x),
                                        current_stream(), found(amax), mutable_data(y)),
                    "gelu_backward");
  }
  if (y.defined()) gelu_forward(y, x);
  on_cpu(x, [&](auto scalar) {
    using Scalar = decltype(scalar);
    gelu_backward(dx.data_ptr<Scalar>(), dy.const_data_ptr<Scalar>(), x.const_data_ptr<Scalar>(), x.numel());
  });
}

void scale_columns(at::Tensor& y, const at::Tensor& x, const at::Tensor& factors) {
  const OperatorRange traced("trireme::scale_columns");
  const Rows rows(x);
  if (!x.is_cuda()) {
    y.copy_(x * factors);
    return;
  }
  launched(cuda::scale_columns(mutable_data(y), data(x), floats(factors), rows.count, rows.width, dtype_of(x),
                               current_stream()),
           "scale_columns");
}

void scale_columns_backward(at::Tensor& dx, at::Tensor& d_factors, const at::Tensor& dy, const at::Tensor& x,
                            const at::Tensor& factors) {
  const OperatorRange traced("trireme::scale_columns_backward");
  const Rows rows(x);
  if (!x.is_cuda()) {
    const at::Tensor wide = dy.to(at::kFloat);
    dx.copy_(wide * factors);
    at::sum_out(d_factors, (wide * x).view({rows.count, rows.width}), {0});
    return;
  }
  if (rows.count == 0) d_factors.zero_();
  at::Tensor partial = scratch(x, cuda::column_scratch(rows.width));
  launched(
      cuda::scale_columns_backward(mutable_data(dx), floats(d_factors), floats(partial), data(dy), data(x),
                                   floats(factors), rows.count, rows.width, dtype_of(x), current_stream()),
      "scale_columns_backward");
}

void rope_inplace(at::Tensor& packed, const at::Tensor& cosine, const at::Tensor& sine, int64_t heads,
                  int64_t head_dim, float direction) {
  const OperatorRange traced("trireme::rope_inplace");
  const int64_t rows = packed.size(0) * packed.size(1), stride = packed.size(2);
  const int64_t seq_len = cosine.dim() == 3 ? rows : packed.size(1);
  if (packed.is_cuda()) {
    return launched(
        cuda::rope_inplace(mutable_data(packed), floats(cosine), floats(sine), rows, seq_len, stride, heads,
                           head_dim, direction, dtype_of(packed), current_stream()),
        "rope");
  }
  on_cpu(packed, [&](auto scalar) {
    using Scalar = decltype(scalar);
    rope_inplace(packed.data_ptr<Scalar>(), floats(cosine), floats(sine), rows, seq_len, stride, heads,
                 head_dim, direction);
  });
}

void pack_head_gradients(at::Tensor& packed, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& cosine, const at::Tensor& sine) {
  const OperatorRange traced("trireme::pack_head_gradients");
  const auto heads_of = [](const at::Tensor& heads) {
    TRIREME_CHECK(heads.stride(3) == 1,
                  "[kernels.pack_head_gradients] head_dim has stride {}, but it must be 1", heads.stride(3));
    return cuda::HeadGradient{data(heads), heads.size(1), heads.stride(0), heads.stride(1), heads.stride(2)};
  };
  launched(cuda::pack_head_gradients(mutable_data(packed), heads_of(query), heads_of(key), heads_of(value),
                                     floats(cosine), floats(sine), packed.size(0), packed.size(1),
                                     query.size(3), dtype_of(packed), current_stream()),
           "pack_head_gradients");
}

void cross_entropy(at::Tensor& loss, at::Tensor& logits, const at::Tensor& targets, double scale,
                   bool want_gradient) {
  const OperatorRange traced("trireme::cross_entropy");
  const Rows rows(logits);
  const auto* const wanted = targets.const_data_ptr<int64_t>();
  if (logits.is_cuda()) {
    return launched(cuda::cross_entropy(floats(loss), mutable_data(logits), wanted, rows.count, rows.width,
                                        logits.stride(0), static_cast<float>(scale), want_gradient,
                                        dtype_of(logits), current_stream()),
                    "cross_entropy");
  }
  const at::Tensor packed = logits.contiguous();
  on_cpu(packed, [&](auto scalar) {
    using Scalar = decltype(scalar);
    cross_entropy(floats(loss), packed.data_ptr<Scalar>(), wanted, rows.count, rows.width, want_gradient);
  });
  if (want_gradient && !packed.is_same(logits)) logits.copy_(packed);
  if (want_gradient && scale != 1.0) logits.mul_(scale);
}

void vocabulary_part(at::Tensor& powers, at::Tensor& stats, const at::Tensor& logits,
                     const at::Tensor& targets, int64_t first) {
  const OperatorRange traced("trireme::vocabulary_part");
  float* const top = floats(stats);
  const int64_t apart = stats.stride(0);
  launched(cuda::vocabulary_part(mutable_data(powers), top, top + apart, top + 2 * apart, data(logits),
                                 targets.const_data_ptr<int64_t>(), first, logits.size(0), logits.size(1),
                                 dtype_of(logits), current_stream()),
           "vocabulary_part");
}

void vocabulary_part_gradient(at::Tensor& gradients, const at::Tensor& logits, const at::Tensor& targets,
                              int64_t first, const at::Tensor& totals) {
  const OperatorRange traced("trireme::vocabulary_part_gradient");
  const float* const top = floats(totals);
  const int64_t apart = totals.stride(0);
  launched(
      cuda::vocabulary_part_gradient(mutable_data(gradients), data(logits), targets.const_data_ptr<int64_t>(),
                                     first, top, top + apart, top + 2 * apart, logits.size(0), logits.size(1),
                                     dtype_of(logits), current_stream()),
      "vocabulary_part_gradient");
}

bool join_vocabulary(at::Tensor& gradient, const std::vector<at::Tensor>& messages, const at::Tensor& factors,
                     const at::Tensor& of_target, const at::Tensor& scale) {
  cuda::VocabularyMessages given{.count = static_cast<int>(messages.size()),
                                 .stride = messages.front().stride(0)};
  if (messages.size() > std::size(given.data)) return false;
  std::ranges::transform(messages, given.data, data);
  launched(
      cuda::join_vocabulary(mutable_data(gradient), given, floats(factors), floats(of_target), floats(scale),
                            gradient.size(0), gradient.size(1), dtype_of(gradient), current_stream()),
      "join_vocabulary");
  return true;
}

void scale(at::Tensor& y, const at::Tensor& x, const at::Tensor& factor) {
  const OperatorRange traced("trireme::scale");
  if (!x.is_cuda()) {
    if (!y.is_same(x)) y.copy_(x);
    y.mul_(factor.item<double>());  // a tensor would be rounded to the dtype of y first
    return;
  }
  launched(cuda::scale(mutable_data(y), dtype_of(y), data(x), floats(factor), /*adds=*/false, x.numel(),
                       dtype_of(x), current_stream()),
           "scale");
}

void add_scaled(at::Tensor& y, const at::Tensor& x, const at::Tensor& factor) {
  if (!x.is_cuda()) {
    y.add_(x, factor.item<double>());
    return;
  }
  launched(cuda::scale(mutable_data(y), dtype_of(y), data(x), floats(factor), /*adds=*/true, x.numel(),
                       dtype_of(x), current_stream()),
           "add_scaled");
}

void fill_normal(at::Tensor& out, uint64_t key, const Counters& at, double deviation) {
  if (!out.is_cuda()) return fill_normal(floats(out), out.numel(), key, at, deviation);
  launched(cuda::fill_normal(floats(out), out.numel(), key, at, deviation, current_stream()), "fill_normal");
}

void fill_kept(at::Tensor& out, uint64_t key, const Counters& at, double p) {
  bool* const kept = out.mutable_data_ptr<bool>();
  if (!out.is_cuda()) return fill_kept(kept, out.numel(), key, at, p);
  launched(cuda::fill_kept(kept, out.numel(), key, at, p, current_stream()), "fill_kept");
}

void embedding_backward(at::Tensor& d_weight, const at::Tensor& dy, const at::Tensor& tokens) {
  const OperatorRange traced("trireme::embedding_backward");
  const auto [sorted, order] = tokens.reshape({-1}).sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const int64_t count = tokens.numel(), width = d_weight.size(1);
  at::Tensor partial = scratch(d_weight, cuda::embedding_scratch(count, width));
  launched(cuda::embedding_backward(mutable_data(d_weight), dtype_of(d_weight), floats(partial), data(dy),
                                    sorted.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>(), count,
                                    width, dtype_of(dy), current_stream()),
           "embedding_backward");
}

void adamw(at::Tensor& param, const MomentsOfRange& moments, const at::Tensor& grad, at::Tensor& copy,
           std::span<const UpdatePart> parts, const AdamWStep& step, const at::Tensor& grad_scale) {
  const OperatorRange traced("trireme::adamw");
  if (param.is_cuda()) {
    return launched(cuda::adamw(floats(param), raw(moments), data(grad), dtype_of(grad), mutable_data(copy),
                                copy_dtype(copy, grad), parts, step, floats(grad_scale), current_stream()),
                    "adamw");
  }
  const AdamWStep here = step_on_cpu(step, copy, grad_scale);
  on_cpu(grad, [&](auto scalar) {
    using Scalar = decltype(scalar);
    adamw(floats(param), raw(moments), grad.const_data_ptr<Scalar>(), mutable_data(copy), parts, here);
  });
}

void sgd(at::Tensor& param, const MomentsOfRange& moments, const at::Tensor& grad, at::Tensor& copy,
         std::span<const UpdatePart> parts, const SgdStep& step, const at::Tensor& grad_scale) {
  const OperatorRange traced("trireme::sgd");
  if (param.is_cuda()) {
    return launched(cuda::sgd(floats(param), raw(moments), data(grad), dtype_of(grad), mutable_data(copy),
                              copy_dtype(copy, grad), parts, step, floats(grad_scale), current_stream()),
                    "sgd");
  }
  const SgdStep here = step_on_cpu(step, copy, grad_scale);
  on_cpu(grad, [&](auto scalar) {
    using Scalar = decltype(scalar);
    sgd(floats(param), raw(moments), grad.const_data_ptr<Scalar>(), mutable_data(copy), parts, here);
  });
}

void sum_of_squares(at::Tensor& out, const at::Tensor& values) {
  const OperatorRange traced("trireme::sum_of_squares");
  if (values.is_cuda()) {
    at::Tensor partial = at::empty({cuda::kSquaresScratch}, out.options());
    return launched(cuda::sum_of_squares(out.mutable_data_ptr<double>(), partial.mutable_data_ptr<double>(),
                                         data(values), dtype_of(values), values.numel(), current_stream()),
                    "sum_of_squares");
  }
  on_cpu(values, [&](auto scalar) {
    using Scalar = decltype(scalar);
    out.fill_(sum_of_squares(values.const_data_ptr<Scalar>(), values.numel()));
  });
}

}  // namespace trireme::kernels
