#pragma once
// Random numbers as a pure function of (key, counter), with the same bits on every CPU and GPU: the
// arithmetic is double without contraction, and only operations that IEEE 754 rounds exactly. Everything is
// constexpr so that nvcc takes it for the GPU as well, and static because the flags of whoever
// includes it matter: normal.cpp and normal.cu.
#include <bit>
#include <cmath>
#include <cstdint>

#include "trireme/base/hash.h"
#include "trireme/kernels/counters.h"

namespace trireme::kernels {

/// out[i] = deviation * a standard normal number of (key, at.of(i)), on a CPU in parallel.
void fill_normal(float* out, int64_t count, uint64_t key, const Counters& at, double deviation);
/// out[i] = whether what (key, at.of(i)) draws is kept: with a probability of 1 - p, for p from 0 to below 1.
void fill_kept(bool* out, int64_t count, uint64_t key, const Counters& at, double p);

namespace detail {

constexpr uint64_t kTwoTo52 = 0x4330000000000000ull;  // as the bits of a double

/// Converts an integer below 2^52; unlike a conversion by the compiler it vectorises everywhere.
static constexpr double to_double(uint64_t integer) {
  return std::bit_cast<double>(integer | kTwoTo52) - 0x1p52;
}

/// The natural logarithm of a normal number, relative error below 1e-13: 2 atanh((m - 1) / (m + 1)) of the
/// mantissa in [sqrt(1/2), sqrt(2)).
static constexpr double log_of(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  const double mantissa = std::bit_cast<double>((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  const bool halve = mantissa > 1.4142135623730951;
  const double m = halve ? 0.5 * mantissa : mantissa;
  const double exponent = to_double(bits >> 52) - (halve ? 1022.0 : 1023.0);
  const double r = (m - 1.0) / (m + 1.0), s = r * r;
  double p = 1.0 / 17.0;
  p = p * s + 1.0 / 15.0;
  p = p * s + 1.0 / 13.0;
  p = p * s + 1.0 / 11.0;
  p = p * s + 1.0 / 9.0;
  p = p * s + 1.0 / 7.0;
  p = p * s + 1.0 / 5.0;
  p = p * s + 1.0 / 3.0;
  p = p * s + 1.0;
  return exponent * 0.6931471805599453 + 2.0 * r * p;
}

/// cos(2 pi v) for v in [0, 1], absolute error below 1e-12: a sine of at most a quarter turn, by Taylor.
static constexpr double cos_of_turns(double v) {
  const double w = v - 0.5;
  const double x = 6.283185307179586 * ((w < 0.0 ? -w : w) - 0.25), s = x * x;
  double p = 1.0 / 355687428096000.0;
  p = p * s - 1.0 / 1307674368000.0;
  p = p * s + 1.0 / 6227020800.0;
  p = p * s - 1.0 / 39916800.0;
  p = p * s + 1.0 / 362880.0;
  p = p * s - 1.0 / 5040.0;
  p = p * s + 1.0 / 120.0;
  p = p * s - 1.0 / 6.0;
  p = p * s + 1.0;
  return x * p;
}

}  // namespace detail

/// A standard normal number for 64 random bits (Box and Muller 1958).
static constexpr double standard_normal(uint64_t bits) {
  constexpr double kUnit = 1.0 / 4294967296.0;
  const double u = (detail::to_double(bits >> 32) + 0.5) * kUnit;
  const double v = (detail::to_double(bits & 0xffffffffu) + 0.5) * kUnit;
  return std::sqrt(-2.0 * detail::log_of(u)) * detail::cos_of_turns(v);
}

/// The numbers of fill_normal() and fill_kept() by counter.
struct NormalDraw {
  uint64_t key;
  double deviation;

  constexpr float operator()(int64_t counter) const {
    return static_cast<float>(deviation * standard_normal(mix64(key, static_cast<uint64_t>(counter))));
  }
};
struct KeptDraw {
  uint64_t key;
  double p;

  constexpr bool operator()(int64_t counter) const {
    return mix64(key, static_cast<uint64_t>(counter)) >> 11 >= static_cast<uint64_t>(p * 0x1p53);
  }
};

}  // namespace trireme::kernels
