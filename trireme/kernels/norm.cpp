#include "trireme/kernels/norm.h"

#include <c10/util/BFloat16.h>

#include <cmath>
#include <vector>

#include "trireme/kernels/parallel.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {
namespace {

/// Adds the kCuts partial rows of `partial` to `total`, in the order of the cuts.
template <typename Scalar>
void add_partials(Scalar* total, const std::vector<float>& partial, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    float sum = 0.0f;
    for (int64_t cut = 0; cut < kCuts; ++cut) sum += partial[static_cast<size_t>(cut * width + i)];
    store(total[i], static_cast<float>(total[i]) + sum);
  }
}

std::vector<float> partial_rows(int64_t width) {
  return std::vector<float>(static_cast<size_t>(kCuts * width), 0.0f);
}

}  // namespace

template <typename Scalar>
void rms_norm_forward(Scalar* y, float* rstd, const Scalar* x, const Scalar* weight, int64_t rows,
                      int64_t width, float eps) {
  for_rows(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const Scalar* in = x + row * width;
      Scalar* out = y + row * width;
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < width; ++i) squares += static_cast<float>(in[i]) * static_cast<float>(in[i]);
      const float r = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
      rstd[row] = r;
      for (int64_t i = 0; i < width; ++i) {
        store(out[i], static_cast<float>(in[i]) * r * static_cast<float>(weight[i]));
      }
    }
  });
}

template <typename Scalar>
void rms_norm_backward(Scalar* dx, Scalar* dweight, const Scalar* dy, const Scalar* x, const Scalar* weight,
                       const float* rstd, int64_t rows, int64_t width) {
  std::vector<float> partial = partial_rows(width);
  for_cuts(rows, [&](int64_t cut, int64_t first, int64_t last) {
    float* dw = partial.data() + cut * width;
    for (int64_t row = first; row < last; ++row) {
      const Scalar* in = x + row * width;
      const Scalar* grad = dy + row * width;
      Scalar* out = dx + row * width;
      const float r = rstd[row];
      float dot = 0.0f;  // sum of dy * weight * xhat
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < width; ++i) {
        dot += static_cast<float>(grad[i]) * static_cast<float>(weight[i]) * static_cast<float>(in[i]);
      }
      const float scale = dot * r * r / static_cast<float>(width);
      for (int64_t i = 0; i < width; ++i) {
        const float g = static_cast<float>(grad[i]);
        const float v = static_cast<float>(in[i]);
        dw[i] += g * v * r;
        store(out[i], r * (g * static_cast<float>(weight[i]) - v * scale));
      }
    }
  });
  add_partials(dweight, partial, width);
}

template <typename Scalar>
void layer_norm_forward(Scalar* y, float* mean, float* rstd, const Scalar* x, const Scalar* weight,
                        const Scalar* bias, int64_t rows, int64_t width, float eps) {
  const float inverse_width = 1.0f / static_cast<float>(width);
  for_rows(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const Scalar* in = x + row * width;
      Scalar* out = y + row * width;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) sum += static_cast<float>(in[i]);
      const float m = sum * inverse_width;
      float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < width; ++i) {
        const float centred = static_cast<float>(in[i]) - m;
        squares += centred * centred;
      }
      const float r = 1.0f / std::sqrt(squares * inverse_width + eps);
      mean[row] = m;
      rstd[row] = r;
      for (int64_t i = 0; i < width; ++i) {
        const float normal = (static_cast<float>(in[i]) - m) * r;
        store(out[i], normal * static_cast<float>(weight[i]) + static_cast<float>(bias[i]));
      }
    }
  });
}

template <typename Scalar>
void layer_norm_backward(Scalar* dx, Scalar* dweight, Scalar* dbias, const Scalar* dy, const Scalar* x,
                         const Scalar* weight, const float* mean, const float* rstd, int64_t rows,
                         int64_t width) {
  std::vector<float> partial_weight = partial_rows(width);
  std::vector<float> partial_bias = partial_rows(width);
  const float inverse_width = 1.0f / static_cast<float>(width);
  for_cuts(rows, [&](int64_t cut, int64_t first, int64_t last) {
    float* dw = partial_weight.data() + cut * width;
    float* db = partial_bias.data() + cut * width;
    for (int64_t row = first; row < last; ++row) {
      const Scalar* in = x + row * width;
      const Scalar* grad = dy + row * width;
      Scalar* out = dx + row * width;
      const float m = mean[row];
      const float r = rstd[row];
      float sum = 0.0f;  // of dy * weight
      float dot = 0.0f;  // of dy * weight * xhat
#pragma omp simd reduction(+ : sum, dot)
      for (int64_t i = 0; i < width; ++i) {
        const float g = static_cast<float>(grad[i]) * static_cast<float>(weight[i]);
        sum += g;
        dot += g * (static_cast<float>(in[i]) - m) * r;
      }
      const float mean_g = sum * inverse_width;
      const float mean_dot = dot * inverse_width;
      for (int64_t i = 0; i < width; ++i) {
        const float g = static_cast<float>(grad[i]);
        const float normal = (static_cast<float>(in[i]) - m) * r;
        dw[i] += g * normal;
        db[i] += g;
        store(out[i], r * (g * static_cast<float>(weight[i]) - mean_g - normal * mean_dot));
      }
    }
  });
  add_partials(dweight, partial_weight, width);
  add_partials(dbias, partial_bias, width);
}

#define TRIREME_INSTANTIATE(Scalar)                                                                         \
  template void rms_norm_forward(Scalar*, float*, const Scalar*, const Scalar*, int64_t, int64_t, float);   \
  template void rms_norm_backward(Scalar*, Scalar*, const Scalar*, const Scalar*, const Scalar*,            \
                                  const float*, int64_t, int64_t);                                          \
  template void layer_norm_forward(Scalar*, float*, float*, const Scalar*, const Scalar*, const Scalar*,    \
                                   int64_t, int64_t, float);                                                \
  template void layer_norm_backward(Scalar*, Scalar*, Scalar*, const Scalar*, const Scalar*, const Scalar*, \
                                    const float*, const float*, int64_t, int64_t);
TRIREME_INSTANTIATE(float)
TRIREME_INSTANTIATE(c10::BFloat16)
#undef TRIREME_INSTANTIATE

}  // namespace trireme::kernels
