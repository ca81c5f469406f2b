#include "trireme/kernels/rope.h"

#include <c10/util/BFloat16.h>

#include "trireme/kernels/parallel.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {

template <typename Scalar>
void rope_inplace(Scalar* x, const float* cosine, const float* sine, int64_t rows, int64_t seq_len,
                  int64_t stride, int64_t heads, int64_t head_dim, float direction) {
  const int64_t half = head_dim / 2;
  for_rows(rows, heads * head_dim, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float* c = cosine + row % seq_len * half;
      const float* s = sine + row % seq_len * half;
      for (int64_t head = 0; head < heads; ++head) {
        Scalar* low = x + row * stride + head * head_dim;
        Scalar* high = low + half;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          const float a = static_cast<float>(low[i]);
          const float b = static_cast<float>(high[i]);
          const float sin_i = direction * s[i];
          store(low[i], a * c[i] - b * sin_i);
          store(high[i], b * c[i] + a * sin_i);
        }
      }
    }
  });
}

template void rope_inplace(float*, const float*, const float*, int64_t, int64_t, int64_t, int64_t, int64_t,
                           float);
template void rope_inplace(c10::BFloat16*, const float*, const float*, int64_t, int64_t, int64_t, int64_t,
                           int64_t, float);

}  // namespace trireme::kernels
