#include "trireme/kernels/activation.h"

#include <c10/util/BFloat16.h>

#include "trireme/kernels/parallel.h"
#include "trireme/kernels/scalar_math.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {

template <typename Scalar>
void swiglu_forward(Scalar* y, const Scalar* gate_up, int64_t rows, int64_t width) {
  for_rows(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const Scalar* gate = gate_up + row * 2 * width;
      const Scalar* up = gate + width;
      Scalar* out = y + row * width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float g = static_cast<float>(gate[i]);
        store(out[i], g * sigmoid(g) * static_cast<float>(up[i]));
      }
    }
  });
}

template <typename Scalar>
void swiglu_backward(Scalar* d_gate_up, const Scalar* dy, const Scalar* gate_up, int64_t rows,
                     int64_t width) {
  for_rows(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const Scalar* gate = gate_up + row * 2 * width;
      const Scalar* up = gate + width;
      const Scalar* grad = dy + row * width;
      Scalar* d_gate = d_gate_up + row * 2 * width;
      Scalar* d_up = d_gate + width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float g = static_cast<float>(gate[i]);
        const float u = static_cast<float>(up[i]);
        const float d = static_cast<float>(grad[i]);
        const float s = sigmoid(g);
        store(d_gate[i], d * u * s * (1.0f + g * (1.0f - s)));
        store(d_up[i], d * g * s);
      }
    }
  });
}

namespace {
constexpr float kRootTwoOverPi = 0.7978845608028654f;
constexpr float kCubic = 0.044715f;
}  // namespace

template <typename Scalar>
void gelu_forward(Scalar* y, const Scalar* x, int64_t count) {
  for_rows(count, 1, [&](int64_t first, int64_t last) {
#pragma omp simd
    for (int64_t i = first; i < last; ++i) {
      const float v = static_cast<float>(x[i]);
      const float inner = kRootTwoOverPi * (v + kCubic * v * v * v);
      store(y[i], 0.5f * v * (1.0f + tanh_approx(inner)));
    }
  });
}

template <typename Scalar>
void gelu_backward(Scalar* dx, const Scalar* dy, const Scalar* x, int64_t count) {
  for_rows(count, 1, [&](int64_t first, int64_t last) {
#pragma omp simd
    for (int64_t i = first; i < last; ++i) {
      const float v = static_cast<float>(x[i]);
      const float t = tanh_approx(kRootTwoOverPi * (v + kCubic * v * v * v));
      const float inner_slope = kRootTwoOverPi * (1.0f + 3.0f * kCubic * v * v);
      const float slope = 0.5f * (1.0f + t) + 0.5f * v * (1.0f - t * t) * inner_slope;
      store(dx[i], static_cast<float>(dy[i]) * slope);
    }
  });
}

#define TRIREME_INSTANTIATE(Scalar)                                                       \
  template void swiglu_forward(Scalar*, const Scalar*, int64_t, int64_t);                 \
  template void swiglu_backward(Scalar*, const Scalar*, const Scalar*, int64_t, int64_t); \
  template void gelu_forward(Scalar*, const Scalar*, int64_t);                            \
  template void gelu_backward(Scalar*, const Scalar*, const Scalar*, int64_t);
TRIREME_INSTANTIATE(float)
TRIREME_INSTANTIATE(c10::BFloat16)
#undef TRIREME_INSTANTIATE

}  // namespace trireme::kernels
