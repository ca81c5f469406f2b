#pragma once
// Tensors between guards, at any alignment, and comparisons on the GPU with one bound per element.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace trireme::kernels::cuda {

constexpr double kSentinel = -123.0;  // exact in every dtype
constexpr int64_t kGuard = 64;        // elements; a multiple of 16 bytes in every dtype

/// Sentinels everywhere, also around the tensor, which lies `shift` elements off a 16-byte boundary.
inline at::Tensor guarded(at::IntArrayRef sizes, at::ScalarType type, int64_t shift) {
  const int64_t count = c10::multiply_integers(sizes);
  const auto options = at::TensorOptions().dtype(type).device(at::kCUDA);
  return at::full({count + shift + 2 * kGuard}, kSentinel, options)
      .narrow(0, kGuard + shift, count)
      .view(sizes);
}

inline at::Tensor guarded_copy(const at::Tensor& tensor, int64_t shift) {
  return guarded(tensor.sizes(), tensor.scalar_type(), shift).copy_(tensor);
}

inline at::Tensor guarded_noise(at::IntArrayRef sizes, at::ScalarType type, int64_t shift) {
  return guarded(sizes, type, shift).normal_();
}

/// Whether nothing was written before and after a tensor made by the functions above.
inline bool guards_intact(const at::Tensor& tensor) {
  const auto elements = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
  const at::Tensor whole = tensor.as_strided({elements}, {1}, 0);
  const int64_t first = tensor.storage_offset(), last = first + tensor.numel();
  return whole.narrow(0, 0, first).eq(kSentinel).all().item<bool>() &&
         whole.narrow(0, last, elements - last).eq(kSentinel).all().item<bool>();
}

/// |actual - exact| <= allowed in every element; all on the GPU, `exact` and `allowed` in double.
inline void expect_within(const at::Tensor& actual, const at::Tensor& exact, const at::Tensor& allowed,
                          const std::string& what) {
  ASSERT_EQ(actual.sizes(), exact.sizes()) << what;
  const at::Tensor bad = ((actual.to(at::kDouble) - exact).abs() <= allowed).logical_not().flatten();
  if (!bad.any().item<bool>()) return;
  const int64_t first = bad.to(at::kInt).argmax().item<int64_t>();
  ADD_FAILURE() << what << ": " << bad.sum().item<int64_t>() << " of " << bad.numel() << " elements, first "
                << first << ": " << actual.flatten()[first].item<double>() << ", exactly "
                << exact.flatten()[first].item<double>();
}

}  // namespace trireme::kernels::cuda
