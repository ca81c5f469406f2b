#pragma once
// Matrix products of one GPU by cuBLASLt, with the algorithm chosen by measurement: the library's own first
// choice is not always the fastest of its proposals.
#include <cstdint>
#include <optional>

#include "trireme/kernels/cuda_kernels.h"

namespace trireme::kernels::cuda {

/// Element (i, j) is data[i * stride + j], or data[j * stride + i] when it lies transposed.
struct Matrix {
  const void* data;
  int64_t stride;
  bool transposed;
};

/// The FP8 formats of a and b, in place of `dtype`, and the scales of their values, as in fp8.h. a lies plain
/// and b transposed.
struct Fp8Operands {
  struct Kind {
    Fp8Format format;
    Fp8Span span;
    auto operator<=>(const Kind&) const = default;
  };
  Kind a, b;
  const float *a_scale, *b_scale;
  bool fast;  ///< sums keep fewer bits
};

/// out (m, n) = a (m, k) @ b (k, n) + bias (n) + addend (m, n); bias and addend may be nullptr, addend may be
/// out. bf16 or fp16, or FP8 with outputs of `dtype`; out and addend of that dtype or, without a bias, fp32;
/// their rows without gaps.
struct MatmulCall {
  Dtype dtype, out_dtype;
  int64_t m, n, k;
  Matrix a, b;
  const void* bias;
  const void* addend;
  void* out;
  std::optional<Fp8Operands> fp8 = {};
};

/// Enqueues on the current stream of the current GPU. The first call of a shape may wait for the device while
/// it tries algorithms, unless a graph is being captured. Throws Error when cuBLASLt knows no algorithm.
void matmul(const MatmulCall& call);

/// Switches trying algorithms on or off (kernels::MatmulTuning); returns the old setting.
bool set_matmul_tuning(bool on);

}  // namespace trireme::kernels::cuda
