#pragma once
// Helpers of the norms of channels-last images: sums over rows by channel, and the rows that come out.
// Private to kernels/*.cpp.
#include <cstdint>
#include <type_traits>

#include "trireme/kernels/store.h"

namespace trireme::kernels {

/// Two terms of an element.
struct ChannelTerms {
  float one, two;
};

/// Writes to ones and twos (channels) the sums over rows [first, last) of what `terms(row, channel)` gives.
template <typename Terms>
void sum_channels(float* ones, float* twos, int64_t first, int64_t last, int64_t channels,
                  const Terms& terms) {
  constexpr int64_t kAtOnce = 16;  // in registers
  int64_t c = 0;
  for (; c + kAtOnce <= channels; c += kAtOnce) {
    float one[kAtOnce] = {}, two[kAtOnce] = {};
    for (int64_t row = first; row < last; ++row) {
      for (int64_t i = 0; i < kAtOnce; ++i) {
        const ChannelTerms term = terms(row, c + i);
        one[i] += term.one;
        two[i] += term.two;
      }
    }
    for (int64_t i = 0; i < kAtOnce; ++i) {
      ones[c + i] = one[i];
      twos[c + i] = two[i];
    }
  }
  for (int64_t i = c; i < channels; ++i) ones[i] = twos[i] = 0.0f;
  for (int64_t row = first; row < last; ++row) {
    for (int64_t i = c; i < channels; ++i) {
      const ChannelTerms term = terms(row, i);
      ones[i] += term.one;
      twos[i] += term.two;
    }
  }
}

/// NaN stays.
template <typename Number>
Number positive_part(Number value) {
  return value < Number(0) ? Number(0) : value;
}

/// Calls body(constant) for `value`.
template <typename Body>
void with_constant(bool value, const Body& body) {
  value ? body(std::true_type{}) : body(std::false_type{});
}

/// Rows [first, last) of y = scale * x + shift by channel, + residual unless that is nullptr, then ReLU with
/// `relu`.
template <typename Scalar>
void write_normalised(Scalar* y, const Scalar* x, const Scalar* residual, const float* scale,
                      const float* shift, int64_t first, int64_t last, int64_t channels, bool relu) {
  with_constant(residual != nullptr, [&](auto adds) {
    with_constant(relu, [&](auto cuts) {
      for (int64_t row = first; row < last; ++row) {
        const Scalar* __restrict in = x + row * channels;
        const Scalar* __restrict other = decltype(adds)::value ? residual + row * channels : in;
        Scalar* __restrict out = y + row * channels;
        for (int64_t c = 0; c < channels; ++c) {
          float value = static_cast<float>(in[c]) * scale[c] + shift[c];
          if constexpr (decltype(adds)::value) value += static_cast<float>(other[c]);
          if constexpr (decltype(cuts)::value) value = positive_part(value);
          store(out[c], value);
        }
      }
    });
  });
}

}  // namespace trireme::kernels
