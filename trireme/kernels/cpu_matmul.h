#pragma once
// Products of fp32 matrices on a CPU, where ours are faster than those of torch's library. MKL, which torch
// has on x86, multiplies by AVX2 on processors that are not Intel's.
#include <cstdint>

namespace trireme::kernels {

/// A matrix whose element (i, j) is data[i * row_stride + j * column_stride]; one of the strides is 1.
struct MatrixView {
  const float* data;
  int64_t row_stride, column_stride;
};

/// Whether multiply() is the faster one for this left matrix, on this processor and in this build.
bool multiplies_faster(const MatrixView& a);

/// out (m, n) = a (m, k) b (k, n), contiguous, plus `start` (m, n) where there is one, whose rows lie
/// `start_stride` apart: 0 for the same row everywhere. `start` may be `out`. Each element is summed in one
/// order whatever the number of threads and the other elements.
void multiply(float* out, const MatrixView& a, const MatrixView& b, int64_t m, int64_t n, int64_t k,
              const float* start = nullptr, int64_t start_stride = 0);

}  // namespace trireme::kernels
