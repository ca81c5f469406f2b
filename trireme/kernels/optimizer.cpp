#include "trireme/kernels/optimizer.h"

#include <c10/util/BFloat16.h>

#include <array>
#include <cmath>

#include "trireme/kernels/parallel.h"

namespace trireme::kernels {
namespace {

void store_bf16(void* copy, const float* param, int64_t first, int64_t last) {
  if (copy == nullptr) return;
  auto* out = static_cast<c10::BFloat16*>(copy);
  for (int64_t i = first; i < last; ++i) out[i] = param[i];
}

}  // namespace

template <typename Grad>
void adamw(float* param, float* exp_avg, float* exp_avg_sq, const Grad* grad, void* copy_bf16, int64_t count,
           const AdamWStep& step) {
  const float keep = 1.0f - step.lr * step.weight_decay;
  const float step_size = step.lr / step.bias_correction1;
  const float inverse_root = 1.0f / std::sqrt(step.bias_correction2);
  for_rows(count, 1, [&](int64_t first, int64_t last) {
#pragma omp simd
    for (int64_t i = first; i < last; ++i) {
      const float g = static_cast<float>(grad[i]) * step.grad_scale;
      const float m = exp_avg[i] + (g - exp_avg[i]) * (1.0f - step.beta1);
      const float v = exp_avg_sq[i] * step.beta2 + g * g * (1.0f - step.beta2);
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      param[i] = param[i] * keep - step_size * m / (std::sqrt(v) * inverse_root + step.eps);
    }
    store_bf16(copy_bf16, param, first, last);
  });
}

template <typename Grad>
void sgd(float* param, float* momentum_buffer, const Grad* grad, void* copy_bf16, int64_t count,
         const SgdStep& step) {
  const float kept = step.first ? 0.0f : step.momentum;
  // The step goes along along_buffer * buffer + along_grad * grad.
  const float along_buffer = step.nesterov ? step.momentum : 1.0f, along_grad = step.nesterov ? 1.0f : 0.0f;
  for_rows(count, 1, [&](int64_t first, int64_t last) {
#pragma omp simd
    for (int64_t i = first; i < last; ++i) {
      const float g = static_cast<float>(grad[i]) * step.grad_scale + step.weight_decay * param[i];
      momentum_buffer[i] = kept * momentum_buffer[i] + g;
      param[i] -= step.lr * (along_buffer * momentum_buffer[i] + along_grad * g);
    }
    store_bf16(copy_bf16, param, first, last);
  });
}

template <typename Value>
double sum_of_squares(const Value* values, int64_t count) {
  std::array<double, kCuts> partial{};
  for_cuts(count, [&](int64_t cut, int64_t first, int64_t last) {
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; ++i) {
      const double value = static_cast<float>(values[i]);
      sum += value * value;
    }
    partial[static_cast<size_t>(cut)] = sum;
  });
  double total = 0.0;
  for (const double sum : partial) total += sum;
  return total;
}

#define TRIREME_INSTANTIATE(Scalar)                                                             \
  template void adamw(float*, float*, float*, const Scalar*, void*, int64_t, const AdamWStep&); \
  template void sgd(float*, float*, const Scalar*, void*, int64_t, const SgdStep&);             \
  template double sum_of_squares(const Scalar*, int64_t);
TRIREME_INSTANTIATE(float)
TRIREME_INSTANTIATE(c10::BFloat16)
#undef TRIREME_INSTANTIATE

}  // namespace trireme::kernels
