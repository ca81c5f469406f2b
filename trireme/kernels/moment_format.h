#pragma once
// How optimizers keep numbers from step to step in fewer bits than fp32. They are rounded to one of two
// neighbours at random, the nearer one more often, so that sums of small changes are right on average (Gupta
// et al. 2015, Deep Learning with Limited Numerical Precision). Random bits are a function of a key and of
// the place of an element in its parameter: the same however the parameter is sharded, on CPUs and GPUs.
// Everything is constexpr so that nvcc takes it for the GPU as well.
#include <bit>
#include <cstdint>

#include "trireme/base/hash.h"

namespace trireme::kernels {

enum class MomentFormat {
  kFp32,
  kBf16,
  kInt8  ///< kMomentBlock neighbours share a power of two, as in MXINT8 (OCP Microscaling Formats, 2023)
};

/// Whether a moment may have any sign or is a sum of squares. kInt8 keeps the roots of squares, and rounds
/// only zeros to zero.
enum class MomentKind { kSigned, kSquares };

/// How many elements form a block, which is rounded together. Blocks begin at multiples of it in their
/// parameter.
constexpr int64_t kMomentBlock = 8;

/// Random bits for one block of one of the optimizer's numbers, 16 for each element.
class MomentBits {
 public:
  constexpr MomentBits(uint64_t key, int64_t block, int number)
      : low_(mix64(key, 4 * static_cast<uint64_t>(block) + 2 * static_cast<uint64_t>(number))),
        high_(mix64(key, 4 * static_cast<uint64_t>(block) + 2 * static_cast<uint64_t>(number) + 1)) {}
  constexpr uint32_t of(int lane) const {
    return static_cast<uint32_t>((lane < 4 ? low_ : high_) >> (lane % 4 * 16)) & 0xffffu;
  }

 private:
  uint64_t low_, high_;
};

namespace detail {

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kNotFinite = 255;    ///< the exponent of a block with NaN or an infinity
constexpr uint32_t kSmallestPower = 8;  ///< powers below would be subnormal
constexpr float kLargestInt8 = 127.0f;

constexpr uint32_t magnitude_bits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7fffffffu;
}

/// 2^(exponent - 133) and its inverse: a block's largest magnitude becomes 64 to 127 of them.
constexpr float unit_of(uint32_t exponent) {
  return std::bit_cast<float>((exponent - 6u) << 23);
}
constexpr float inverse_of(uint32_t exponent) {
  return std::bit_cast<float>((260u - exponent) << 23);
}

/// The smallest exponent with which a magnitude, given by its bits, is at most 127 units.
constexpr uint32_t exponent_of(uint32_t most) {
  if (most >= kInfinityBits) return kNotFinite;
  const uint32_t exponent = (most + 0x1ffffu) >> 23;
  return exponent < kSmallestPower ? kSmallestPower : exponent > 254u ? 254u : exponent;
}

/// t + u rounded down, for u in (0, 1) of 15 bits; |t| is at most 127, and an integer stays.
constexpr int round_at_random(float t, uint32_t bits) {
  const float u = (static_cast<float>(bits >> 1) + 0.5f) * 0x1p-15f;
  return static_cast<int>(t + 128.0f + u) - 128;
}

}  // namespace detail

/// bf16 bits of one of x's two neighbours, and of x itself where it is one.
constexpr uint16_t to_moment_bf16(float x, uint32_t bits) {
  const uint32_t word = std::bit_cast<uint32_t>(x);
  if ((word & 0x7fffffffu) > detail::kInfinityBits) return 0x7fc0;
  return static_cast<uint16_t>((word + bits) >> 16);
}
constexpr float from_moment_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// x: the numbers of a block, or their roots for kSquares. Returns the exponent.
constexpr uint8_t to_moment_int8(const float (&x)[kMomentBlock], int8_t (&out)[kMomentBlock], MomentKind kind,
                                 const MomentBits& bits) {
  uint32_t most = 0;
  for (const float value : x) {
    const uint32_t magnitude = detail::magnitude_bits(value);
    most = magnitude > most ? magnitude : most;
  }
  const uint32_t exponent = detail::exponent_of(most);
  const bool finite = exponent != detail::kNotFinite;
  const float inverse = detail::inverse_of(exponent);
  for (int lane = 0; lane < kMomentBlock; ++lane) {
    const float t = finite ? x[lane] * inverse : 0.0f;
    int rounded = detail::round_at_random(t < -127.0f ? -127.0f : t > 127.0f ? 127.0f : t, bits.of(lane));
    if (kind == MomentKind::kSquares && rounded == 0 && t > 0.0f) rounded = 1;
    out[lane] = static_cast<int8_t>(rounded > 127 ? 127 : rounded);
  }
  return static_cast<uint8_t>(exponent);
}

/// The number, or its root for kSquares.
constexpr float from_moment_int8(int8_t value, uint8_t exponent) {
  if (exponent == detail::kNotFinite) return std::bit_cast<float>(0x7fc00000u);
  return static_cast<float>(value) * detail::unit_of(exponent);
}

}  // namespace trireme::kernels
