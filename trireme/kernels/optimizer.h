#pragma once
// Optimizer updates over flat fp32 ranges in one pass, and the sum of squares that clipping needs. CPU.
#include <cstdint>

namespace trireme::kernels {

/// Constants of one AdamW step (Loshchilov and Hutter 2019); bias corrections are 1 - beta^t.
struct AdamWStep {
  float lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2;
  float grad_scale;  ///< multiplies every gradient first: the clip factor
};

/// Grad is float or c10::BFloat16, here and below. Updates param, exp_avg and exp_avg_sq in place; `copy`
/// (nullptr: none) receives the parameters in bf16.
template <typename Grad>
void adamw(float* param, float* exp_avg, float* exp_avg_sq, const Grad* grad, void* copy_bf16, int64_t count,
           const AdamWStep& step);

/// SGD with momentum (Polyak 1964) as PyTorch defines it: buffer = momentum * buffer + grad (first step:
/// grad). With Nesterov's momentum the step goes along grad + momentum * buffer instead of the buffer.
struct SgdStep {
  float lr, momentum, weight_decay, grad_scale;
  bool first;
  bool nesterov = false;
};
template <typename Grad>
void sgd(float* param, float* momentum_buffer, const Grad* grad, void* copy_bf16, int64_t count,
         const SgdStep& step);

/// Sum of squares in double, the same bits for any number of threads.
template <typename Value>
double sum_of_squares(const Value* values, int64_t count);

}  // namespace trireme::kernels
