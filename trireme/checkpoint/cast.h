#pragma once
// Floating-point elements of one dtype as those of another, without tensors.
#include <cstdint>
#include <string_view>

namespace trireme::checkpoint {

/// Whether elements of safetensors dtype `from` can be made `to`: both are among F32, BF16 and F16, or equal.
bool can_cast(std::string_view from, std::string_view to);

/// `count` elements at `from` as another dtype at `to`, which do not overlap: rounded to nearest, ties to
/// even. Returns how many finite numbers have become infinite. Both dtypes as can_cast() has them.
int64_t cast(std::string_view from_dtype, const void* from, std::string_view to_dtype, void* to,
             int64_t count);

/// One number of F64, F32, BF16 or F16; NaN of any other dtype.
double number_at(std::string_view dtype, const void* bytes);

}  // namespace trireme::checkpoint
