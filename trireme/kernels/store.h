#pragma once
// Writes of CPU kernels that compute in fp32 and keep their results in fp32 or bf16.
#include <c10/util/BFloat16.h>

#include <bit>
#include <cstdint>

namespace trireme::kernels {

inline void store(float& to, float value) {
  to = value;
}
/// Rounds to nearest, ties to even, as c10::BFloat16 does; a NaN becomes 0x7fc0. Compilers vectorise loops
/// that write the bits, and none that copy an object of that class.
inline void store(c10::BFloat16& to, float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  to.x = static_cast<uint16_t>(value == value ? rounded : 0x7fc0U);
}

}  // namespace trireme::kernels
