#pragma once
// Our kernels on tensors: one function for CPU and GPU, where the raw ones (norm.h, ..., cuda_kernels.h) are
// per device. Tensors are contiguous unless said otherwise, of one dtype (fp32 or bf16; on a GPU also fp16)
// and on one device; outputs have their final shape. Nothing here is differentiable. On a GPU everything is
// enqueued on the current stream.
//
// `amax` (1) fp32, where a function takes it: on a GPU it is raised to the largest magnitude in y or, in a
// backward function, in its first output, so that fp8_amax() need not read that tensor again. NaN is above
// all. A CPU leaves it as it is. `dx_sums` (width) fp32, where a backward function takes it, becomes on a GPU
// the sum of the rows of dx, which are at least one; a CPU leaves it as it is.
#include <ATen/core/Tensor.h>

#include "trireme/kernels/counters.h"
#include "trireme/kernels/moment.h"
#include "trireme/kernels/optimizer.h"

namespace trireme::kernels {

/// sum = x + delta, y = sum * rstd * weight over the last dimension. With an undefined delta x is normalised
/// and `sum` is not touched. rstd (rows) fp32.
void rms_norm_forward(at::Tensor& y, at::Tensor& sum, at::Tensor& rstd, const at::Tensor& x,
                      const at::Tensor& delta, const at::Tensor& weight, double eps,
                      const at::Tensor& amax = {});
/// dx = d_sum (undefined: 0) + the gradient of the norm at x; d_weight is added to.
void rms_norm_backward(at::Tensor& dx, at::Tensor& d_weight, const at::Tensor& dy, const at::Tensor& d_sum,
                       const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd,
                       const at::Tensor& amax = {});

/// As the RMS norm, with mean and bias; statistics (2, rows) fp32 = mean, rstd.
void layer_norm_forward(at::Tensor& y, at::Tensor& sum, at::Tensor& statistics, const at::Tensor& x,
                        const at::Tensor& delta, const at::Tensor& weight, const at::Tensor& bias, double eps,
                        const at::Tensor& amax = {});
void layer_norm_backward(at::Tensor& dx, at::Tensor& d_weight, at::Tensor& d_bias, const at::Tensor& dy,
                         const at::Tensor& d_sum, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& statistics, const at::Tensor& amax = {},
                         const at::Tensor& dx_sums = {});

/// Where the gradient of a parameter goes.
struct GradientOut {
  at::Tensor tensor;
  bool adds = false;  ///< to what is there; else it is overwritten
};

/// As in batch_norm.h, of images (B, C, H, W) whose channels are innermost in memory. statistics (4, C) fp32
/// = mean, rstd, and what a GPU keeps for backward besides.
struct BatchNormCall {
  at::Tensor residual = {};                        ///< as x; undefined: none
  at::Tensor running_mean = {}, running_var = {};  ///< (C) fp32; undefined: left as they are
  at::Tensor batches = {};                         ///< int64 scalar that counts calls; undefined: none
  double eps = 1e-5, momentum = 0.1;
  bool relu = false;
};
void batch_norm_forward(at::Tensor& y, at::Tensor& statistics, const at::Tensor& x, const at::Tensor& weight,
                        const at::Tensor& bias, const BatchNormCall& call);
/// Where ReLU followed, y is what came out (on a GPU it may be undefined unless a residual was added), and
/// d_residual, which may be undefined, receives the residual's gradient.
void batch_norm_backward(at::Tensor& dx, at::Tensor& d_residual, const GradientOut& d_weight,
                         const GradientOut& d_bias, const at::Tensor& dy, const at::Tensor& x,
                         const at::Tensor& y, const at::Tensor& weight, const at::Tensor& statistics,
                         bool relu);
/// Whether batch_norm_forward() and its backward take x, which may be any tensor.
bool can_batch_norm(const at::Tensor& x);

/// On a CPU, as in group_norm.h, of images (B, C, H, W) whose channels are innermost in memory. statistics
/// (B, 2, groups) fp32. d_residual may be undefined, y where no ReLU followed.
struct GroupNormCall {
  int64_t groups = 1;
  at::Tensor residual = {};  ///< as x; undefined: none
  double eps = 1e-5;
  bool relu = false;
};
void group_norm_forward(at::Tensor& y, at::Tensor& statistics, const at::Tensor& x, const at::Tensor& weight,
                        const at::Tensor& bias, const GroupNormCall& call);
void group_norm_backward(at::Tensor& dx, at::Tensor& d_residual, at::Tensor& d_weight, at::Tensor& d_bias,
                         const at::Tensor& dy, const at::Tensor& x, const at::Tensor& y,
                         const at::Tensor& weight, const at::Tensor& statistics);
/// Whether they take x.
bool can_group_norm(const at::Tensor& x);

/// On a GPU, for weights of convolutions (out, in, kernel, kernel) that can_turn(): turned, channels-last, =
/// weight, contiguous; and a gradient, channels-last, goes to `to`, contiguous, which may be fp32.
void turn_conv_weights(at::Tensor& turned, const at::Tensor& weight);
void add_conv_weights(const GradientOut& to, const at::Tensor& gradient);
bool can_turn(const at::Tensor& weight);

/// On a GPU, as in cuda_kernels.h, of images whose channels are innermost in memory; taken (as y) uint8.
struct PoolWindow {
  int64_t kernel, stride, padding;
};
void max_pool_forward(at::Tensor& y, at::Tensor& taken, const at::Tensor& x, const PoolWindow& window);
void max_pool_backward(at::Tensor& dx, const at::Tensor& dy, const at::Tensor& taken,
                       const PoolWindow& window);
/// Whether they take x.
bool can_max_pool(const at::Tensor& x);

/// total (width) += the sum of the rows of x (rows, width).
void add_column_sums(at::Tensor& total, const at::Tensor& x);

/// As in activation.h: gate_up (..., 2F), y (..., F). A backward also gives y again, the bits of the forward,
/// where `y` is defined: on a GPU in the same pass.
void swiglu_forward(at::Tensor& y, const at::Tensor& gate_up, const at::Tensor& amax = {});
void swiglu_backward(at::Tensor& d_gate_up, const at::Tensor& dy, const at::Tensor& gate_up,
                     const at::Tensor& amax = {}, at::Tensor y = {});
void gelu_forward(at::Tensor& y, const at::Tensor& x, const at::Tensor& amax = {});
void gelu_backward(at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& amax = {},
                   at::Tensor y = {}, const at::Tensor& dx_sums = {});

/// y (..., width) = x * factors, in x's dtype; factors (width) fp32, one for each column. The gradients: dx
/// as x, and d_factors (width) fp32, the sums over all rows of dy * x.
void scale_columns(at::Tensor& y, const at::Tensor& x, const at::Tensor& factors);
void scale_columns_backward(at::Tensor& dx, at::Tensor& d_factors, const at::Tensor& dy, const at::Tensor& x,
                            const at::Tensor& factors);

/// As in rope.h, of the first `heads` heads of each row of packed (B, T, stride). Tables (B, T, head_dim / 2)
/// have a row for each of these.
void rope_inplace(at::Tensor& packed, const at::Tensor& cosine, const at::Tensor& sine, int64_t heads,
                  int64_t head_dim, float direction);
/// On a GPU. packed (B, T, (H + 2K) hd) from the gradients of the heads (B, H or K, T, hd), whose last
/// dimension is contiguous; query and key are turned back when `cosine` is defined.
void pack_head_gradients(at::Tensor& packed, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& cosine, const at::Tensor& sine);

/// loss (rows) fp32 in nats; when `want_gradient`, logits (rows, classes) become scale * (softmax - onehot).
/// Rows whose target is kIgnoredTarget (cross_entropy.h) have neither. A target that is no class is a
/// DataError on a CPU; on a GPU, whose values the host does not see, loss and gradient of its row become NaN.
/// Rows of logits may be further apart than `classes`; on a GPU what lies between becomes 0.
void cross_entropy(at::Tensor& loss, at::Tensor& logits, const at::Tensor& targets, double scale,
                   bool want_gradient);

/// On a GPU, for logits (n, classes) of a part of a vocabulary that begins with class `first`, contiguous.
/// stats (3, n) fp32, whose rows may be apart: the largest, the sum of exp(logit - largest), the target's
/// logit; that is -inf where another part has it, and NaN for -inf. powers (n, classes): those exponentials,
/// and 0 for the target; undefined: not wanted.
void vocabulary_part(at::Tensor& powers, at::Tensor& stats, const at::Tensor& logits,
                     const at::Tensor& targets, int64_t first);
/// On a GPU. gradients (n, classes) = scale * (exp(logit - largest) / sum - onehot(target)), zero where scale
/// is; totals (3, n) fp32, whose rows may be apart: largest and sum of the whole vocabulary, and scale.
/// `gradients` may be `logits`.
void vocabulary_part_gradient(at::Tensor& gradients, const at::Tensor& logits, const at::Tensor& targets,
                              int64_t first, const at::Tensor& totals);
/// On a GPU. gradient (n, width) = for all messages (n, k) the sum of their first `width` columns times
/// factors (messages, n), and of as many behind them times of_target (n); zero where scale (n) is. False:
/// there are more messages than a launch takes.
bool join_vocabulary(at::Tensor& gradient, const std::vector<at::Tensor>& messages, const at::Tensor& factors,
                     const at::Tensor& of_target, const at::Tensor& scale);

/// y = factor * x, and y += factor * x; factor is an fp32 scalar on the device. y may be fp32 whatever x is.
void scale(at::Tensor& y, const at::Tensor& x, const at::Tensor& factor);
void add_scaled(at::Tensor& y, const at::Tensor& x, const at::Tensor& factor);

/// As in normal.h: out fp32, and bool.
void fill_normal(at::Tensor& out, uint64_t key, const Counters& at, double deviation);
void fill_kept(at::Tensor& out, uint64_t key, const Counters& at, double p);

/// On a GPU. d_weight (rows, width), of the dtype of dy or fp32, += the sums of the rows of dy (..., width)
/// that `tokens` (...) name.
void embedding_backward(at::Tensor& d_weight, const at::Tensor& dy, const at::Tensor& tokens);

/// As in optimizer.h, over the parts of param (n) fp32; grad (n) fp32 or the dtype of `copy` (undefined:
/// none), which receives the parameters: in bf16 or fp16, on a CPU in bf16 alone. `grad_scale` (undefined:
/// 1), an fp32 scalar on the device, multiplies every gradient besides step.grad_scale.
void adamw(at::Tensor& param, const MomentsOfRange& moments, const at::Tensor& grad, at::Tensor& copy,
           std::span<const UpdatePart> parts, const AdamWStep& step, const at::Tensor& grad_scale = {});
void sgd(at::Tensor& param, const MomentsOfRange& moments, const at::Tensor& grad, at::Tensor& copy,
         std::span<const UpdatePart> parts, const SgdStep& step, const at::Tensor& grad_scale = {});

/// out = the sum of squares of values (n); out is an fp64 scalar.
void sum_of_squares(at::Tensor& out, const at::Tensor& values);

}  // namespace trireme::kernels
