#pragma once
// Optimizer updates over flat ranges in one pass, and the sum of squares that clipping needs. CPU.
#include <cstdint>
#include <span>

#include "trireme/kernels/moment_format.h"

namespace trireme::kernels {

/// The numbers that an optimizer keeps of each element of a range, besides the parameter itself.
struct Moments {
  static constexpr int kMost = 2;
  MomentFormat format = MomentFormat::kFp32;
  void* values[kMost] = {};        ///< of each number: float, the bits of bf16, or int8
  uint8_t* exponents[kMost] = {};  ///< kInt8: of each block of the range, whose last one may be cut
  // For rounding.
  uint64_t key = 0;         ///< of the parameter and the step
  int64_t first_block = 0;  ///< of the range in its parameter
};

/// Elements of a range that are updated with settings of their own. A range with moments in fewer bits than
/// fp32 has one part: all of it.
struct UpdatePart {
  int64_t begin = 0, end = 0;
  float lr = 0.0f, weight_decay = 0.0f;
};

/// Constants of one AdamW step (Loshchilov and Hutter 2019); bias corrections are 1 - beta^t.
struct AdamWStep {
  float beta1, beta2, eps, bias_correction1, bias_correction2;
  float grad_scale;  ///< multiplies every gradient first: the clip factor
};
/// The averages of gradients, and of their squares.
inline constexpr int kAdamWMoments = 2;
constexpr MomentKind adamw_moment(int number) {
  return number == 0 ? MomentKind::kSigned : MomentKind::kSquares;
}

/// Grad is float or c10::BFloat16, here and below. Updates param and moments in place, as far as `parts` go;
/// `copy` (nullptr: none) receives the parameters in bf16.
template <typename Grad>
void adamw(float* param, const Moments& moments, const Grad* grad, void* copy_bf16,
           std::span<const UpdatePart> parts, const AdamWStep& step);

/// SGD with momentum (Polyak 1964) as PyTorch defines it: buffer = momentum * buffer + grad (first step:
/// grad). With Nesterov's momentum the step goes along grad + momentum * buffer instead of the buffer.
struct SgdStep {
  float momentum, grad_scale;
  bool first;
  bool nesterov = false;
};
/// The buffer.
inline constexpr int kSgdMoments = 1;
constexpr MomentKind sgd_moment(int) {
  return MomentKind::kSigned;
}

template <typename Grad>
void sgd(float* param, const Moments& moments, const Grad* grad, void* copy_bf16,
         std::span<const UpdatePart> parts, const SgdStep& step);

/// Sum of squares in double, the same bits for any number of threads.
template <typename Value>
double sum_of_squares(const Value* values, int64_t count);

}  // namespace trireme::kernels
