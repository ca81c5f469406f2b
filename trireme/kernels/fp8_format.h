#pragma once
// Eight-bit floats: formats, and what a scale spans (Micikevicius et al. 2022, FP8 Formats for Deep
// Learning).
#include <cstdint>

namespace trireme::kernels {

enum class Fp8Format {
  kE4m3,  ///< 4 bits of exponent, 3 of fraction, no infinity: up to 448
  kE5m2   ///< 5 and 2: up to 57344
};

/// The largest finite value.
constexpr float largest(Fp8Format format) {
  return format == Fp8Format::kE4m3 ? 448.0f : 57344.0f;
}

/// Elements along a side of a block with a scale of its own.
constexpr int64_t kFp8Block = 128;

/// The elements of a matrix that share a scale.
enum class Fp8Span {
  kTensor,      ///< all
  kRow,         ///< a row
  kRowBlock,    ///< kFp8Block neighbours in a row
  kSquareBlock  ///< kFp8Block rows by as many columns
};

/// Magnitudes below count as this one, so that no scale is zero.
constexpr float kSmallestAmax = 1e-12f;

}  // namespace trireme::kernels
