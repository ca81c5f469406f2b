#include "trireme/kernels/cross_entropy.h"

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "trireme/base/error.h"
#include "trireme/kernels/parallel.h"
#include "trireme/kernels/scalar_math.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {
namespace {

void check_targets(const int64_t* targets, int64_t rows, int64_t classes) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t target = targets[row];
    if ((target >= 0 && target < classes) || target == kIgnoredTarget) continue;
    throw DataError(
        "[kernels.cross_entropy] target {} of row {} is outside the {} classes; use targets from 0 to {}, or "
        "{} to leave a row out of the loss",
        target, row, classes, classes - 1, kIgnoredTarget);
  }
}

}  // namespace

template <typename Scalar>
void cross_entropy(float* loss, Scalar* logits, const int64_t* targets, int64_t rows, int64_t classes,
                   bool want_gradient) {
  check_targets(targets, rows, classes);
  for_rows(rows, classes, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      Scalar* z = logits + row * classes;
      if (targets[row] == kIgnoredTarget) {
        loss[row] = 0.0f;
        if (want_gradient) std::fill(z, z + classes, static_cast<Scalar>(0.0f));
        continue;
      }
      float top = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : top)
      for (int64_t i = 0; i < classes; ++i)
        top = static_cast<float>(z[i]) > top ? static_cast<float>(z[i]) : top;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < classes; ++i) sum += exp_approx(static_cast<float>(z[i]) - top);
      const int64_t target = targets[row];
      loss[row] = std::log(sum) + top - static_cast<float>(z[target]);
      if (!want_gradient) continue;
      const float inverse = 1.0f / sum;
      // Before its place is overwritten: rounded first, it would lose what is near 1.
      const float of_target = exp_approx(static_cast<float>(z[target]) - top) * inverse - 1.0f;
#pragma omp simd
      for (int64_t i = 0; i < classes; ++i) {
        store(z[i], exp_approx(static_cast<float>(z[i]) - top) * inverse);
      }
      store(z[target], of_target);
    }
  });
}

template void cross_entropy(float*, float*, const int64_t*, int64_t, int64_t, bool);
template void cross_entropy(float*, c10::BFloat16*, const int64_t*, int64_t, int64_t, bool);

}  // namespace trireme::kernels
