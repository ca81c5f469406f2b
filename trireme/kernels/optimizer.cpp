#include "trireme/kernels/optimizer.h"

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "trireme/kernels/parallel.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {
namespace {

void store_bf16(void* copy, const float* param, int64_t first, int64_t last) {
  if (copy == nullptr) return;
  auto* out = static_cast<c10::BFloat16*>(copy);
  for (int64_t i = first; i < last; ++i) store(out[i], param[i]);
}

/// Elements whose moments are in fp32 at a time, where memory has them in fewer bits.
constexpr int64_t kChunk = 128 * kMomentBlock;

float root_of(float x, MomentKind kind) {
  return kind == MomentKind::kSquares ? std::sqrt(x) : x;
}
float number_of(float root, MomentKind kind) {
  return kind == MomentKind::kSquares ? root * root : root;
}

void write_block(const float* x, const Moments& moments, int number, MomentKind kind, int64_t first,
                 int64_t count) {
  const int64_t block = first / kMomentBlock;
  const MomentBits bits(moments.key, moments.first_block + block, number);
  if (moments.format == MomentFormat::kBf16) {
    auto* const out = static_cast<uint16_t*>(moments.values[number]) + first;
    for (int64_t i = 0; i < count; ++i) out[i] = to_moment_bf16(x[i], bits.of(static_cast<int>(i)));
    return;
  }
  float roots[kMomentBlock] = {};
  for (int64_t i = 0; i < count; ++i) roots[i] = root_of(x[i], kind);
  int8_t rounded[kMomentBlock];
  moments.exponents[number][block] = to_moment_int8(roots, rounded, kind, bits);
  std::copy_n(rounded, count, static_cast<int8_t*>(moments.values[number]) + first);
}

/// Writes the moments of the elements from `first` on, a multiple of kMomentBlock.
void write_range(const float* x, const Moments& moments, int number, MomentKind kind, int64_t first,
                 int64_t count) {
  for (int64_t i = 0; i < count; i += kMomentBlock)
    write_block(x + i, moments, number, kind, first + i, std::min(kMomentBlock, count - i));
}

void read_range(float* out, const Moments& moments, int number, MomentKind kind, int64_t first,
                int64_t count) {
  if (moments.format == MomentFormat::kBf16) {
    const auto* const bits = static_cast<const uint16_t*>(moments.values[number]) + first;
    for (int64_t i = 0; i < count; ++i) out[i] = from_moment_bf16(bits[i]);
    return;
  }
  const auto* const values = static_cast<const int8_t*>(moments.values[number]) + first;
  const uint8_t* const exponents = moments.exponents[number] + first / kMomentBlock;
  for (int64_t i = 0; i < count; ++i)
    out[i] = number_of(from_moment_int8(values[i], exponents[i / kMomentBlock]), kind);
}

/// body(first, last) over parts of `count` elements that begin at multiples of kChunk.
template <typename Body>
void for_chunks(int64_t count, const Body& body) {
  for_rows((count + kChunk - 1) / kChunk, kChunk, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk)
      body(chunk * kChunk, std::min((chunk + 1) * kChunk, count));
  });
}

/// body(elements, begin, end) updates the elements from `begin` to `end` of arrays that begin at `elements`,
/// and so do states[n], the numbers of kind kind_of(n) of these elements. All of them make up `part`.
template <int kNumbers, typename Body>
void with_moments(const Moments& moments, MomentKind (*kind_of)(int), const UpdatePart& part,
                  const Body& body) {
  float* states[kNumbers];
  if (moments.format == MomentFormat::kFp32) {
    for (int n = 0; n < kNumbers; ++n) states[n] = static_cast<float*>(moments.values[n]);
    for_rows(part.end - part.begin, 1,
             [&](int64_t first, int64_t last) { body(0, states, part.begin + first, part.begin + last); });
    return;
  }
  for_chunks(part.end, [&](int64_t first, int64_t last) {
    float scratch[kNumbers][kChunk];
    float* chunk[kNumbers];
    for (int n = 0; n < kNumbers; ++n) {
      chunk[n] = scratch[n];
      read_range(scratch[n], moments, n, kind_of(n), first, last - first);
    }
    body(first, chunk, 0, last - first);
    for (int n = 0; n < kNumbers; ++n) write_range(scratch[n], moments, n, kind_of(n), first, last - first);
  });
}

template <typename Grad>
void adamw_range(float* param, float* exp_avg, float* exp_avg_sq, const Grad* grad, int64_t first,
                 int64_t last, const UpdatePart& part, const AdamWStep& step) {
  const float keep = 1.0f - part.lr * part.weight_decay;
  const float step_size = part.lr / step.bias_correction1;
  const float inverse_root = 1.0f / std::sqrt(step.bias_correction2);
#pragma omp simd
  for (int64_t i = first; i < last; ++i) {
    const float g = static_cast<float>(grad[i]) * step.grad_scale;
    const float m = exp_avg[i] + (g - exp_avg[i]) * (1.0f - step.beta1);
    const float v = exp_avg_sq[i] * step.beta2 + g * g * (1.0f - step.beta2);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param[i] = param[i] * keep - step_size * m / (std::sqrt(v) * inverse_root + step.eps);
  }
}

template <typename Grad>
void sgd_range(float* param, float* momentum_buffer, const Grad* grad, int64_t first, int64_t last,
               const UpdatePart& part, const SgdStep& step) {
  const float kept = step.first ? 0.0f : step.momentum;
  // The step goes along along_buffer * buffer + along_grad * grad.
  const float along_buffer = step.nesterov ? step.momentum : 1.0f, along_grad = step.nesterov ? 1.0f : 0.0f;
#pragma omp simd
  for (int64_t i = first; i < last; ++i) {
    const float g = static_cast<float>(grad[i]) * step.grad_scale + part.weight_decay * param[i];
    momentum_buffer[i] = kept * momentum_buffer[i] + g;
    param[i] -= part.lr * (along_buffer * momentum_buffer[i] + along_grad * g);
  }
}

}  // namespace

template <typename Grad>
void adamw(float* param, const Moments& moments, const Grad* grad, void* copy_bf16,
           std::span<const UpdatePart> parts, const AdamWStep& step) {
  for (const UpdatePart& part : parts) {
    with_moments<kAdamWMoments>(
        moments, adamw_moment, part, [&](int64_t at, float* const(&states)[2], int64_t first, int64_t last) {
          adamw_range(param + at, states[0], states[1], grad + at, first, last, part, step);
          store_bf16(copy_bf16, param, at + first, at + last);
        });
  }
}

template <typename Grad>
void sgd(float* param, const Moments& moments, const Grad* grad, void* copy_bf16,
         std::span<const UpdatePart> parts, const SgdStep& step) {
  for (const UpdatePart& part : parts) {
    with_moments<kSgdMoments>(moments, sgd_moment, part,
                              [&](int64_t at, float* const(&states)[1], int64_t first, int64_t last) {
                                sgd_range(param + at, states[0], grad + at, first, last, part, step);
                                store_bf16(copy_bf16, param, at + first, at + last);
                              });
  }
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

#define TRIREME_INSTANTIATE(Scalar)                                                              \
  template void adamw(float*, const Moments&, const Scalar*, void*, std::span<const UpdatePart>, \
                      const AdamWStep&);                                                         \
  template void sgd(float*, const Moments&, const Scalar*, void*, std::span<const UpdatePart>,   \
                    const SgdStep&);                                                             \
  template double sum_of_squares(const Scalar*, int64_t);
TRIREME_INSTANTIATE(float)
TRIREME_INSTANTIATE(c10::BFloat16)
#undef TRIREME_INSTANTIATE

}  // namespace trireme::kernels
