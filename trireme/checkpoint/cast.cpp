#include "trireme/checkpoint/cast.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "trireme/base/error.h"
#include "trireme/checkpoint/safetensors_header.h"

namespace trireme::checkpoint {
namespace {

float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);  // stays one, and quiet
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  const float sign = (bits >> 15) != 0 ? -1.0F : 1.0F;
  if (exponent == 0x1f && fraction != 0) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0x1f) return sign * std::numeric_limits<float>::infinity();
  const int scaled = exponent == 0 ? fraction : fraction + 0x400;
  return sign * std::ldexp(static_cast<float>(scaled), exponent == 0 ? -24 : exponent - 25);
}

uint16_t to_half(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint32_t>(bits >> 16 & 0x8000);
  const uint32_t size = bits & 0x7fffffff;
  constexpr uint32_t kInfinity = 0x7f800000, kTooLarge = 0x477ff000, kNormal = 0x38800000;
  uint32_t half = 0;
  if (size > kInfinity) {
    half = 0x7e00;
  } else if (size >= kTooLarge) {  // 65520, half-way between the largest number and the one that would follow
    half = 0x7c00;
  } else if (size >= kNormal) {
    constexpr uint32_t kRebias = (127 - 15) << 23;
    half = (size - kRebias + 0xfff + (size >> 13 & 1)) >> 13;
  } else {
    half = static_cast<uint32_t>(std::nearbyint(std::ldexp(std::bit_cast<float>(size), 24)));
  }
  return static_cast<uint16_t>(sign | half);
}

template <typename T>
T load(const void* bytes, int64_t index = 0) {
  T value;
  std::memcpy(&value, static_cast<const char*>(bytes) + index * static_cast<int64_t>(sizeof value),
              sizeof value);
  return value;
}

float wide_at(std::string_view dtype, const void* bytes, int64_t index) {
  if (dtype == "F32") return load<float>(bytes, index);
  const auto bits = load<uint16_t>(bytes, index);
  return dtype == "BF16" ? from_bf16(bits) : from_half(bits);
}

bool is_float(std::string_view dtype) {
  return dtype == "F32" || dtype == "BF16" || dtype == "F16";
}

}  // namespace

bool can_cast(std::string_view from, std::string_view to) {
  return from == to || (is_float(from) && is_float(to));
}

int64_t cast(std::string_view from_dtype, const void* from, std::string_view to_dtype, void* to,
             int64_t count) {
  TRIREME_CHECK(can_cast(from_dtype, to_dtype), "[checkpoint.cast] cannot cast {} to {}", from_dtype,
                to_dtype);
  const int64_t size = safetensors_itemsize(to_dtype);
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(count * size));
    return 0;
  }
  int64_t overflows = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = wide_at(from_dtype, from, i);
    char* out = static_cast<char*>(to) + i * size;
    if (to_dtype == "F32") {
      std::memcpy(out, &value, sizeof value);
      continue;
    }
    const uint16_t narrow = to_dtype == "BF16" ? to_bf16(value) : to_half(value);
    overflows += static_cast<int64_t>(std::isfinite(value) && std::isinf(wide_at(to_dtype, &narrow, 0)));
    std::memcpy(out, &narrow, sizeof narrow);
  }
  return overflows;
}

double number_at(std::string_view dtype, const void* bytes) {
  if (dtype == "F64") return load<double>(bytes);
  return is_float(dtype) ? static_cast<double>(wide_at(dtype, bytes, 0))
                         : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace trireme::checkpoint
