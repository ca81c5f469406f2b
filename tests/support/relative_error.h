#pragma once
#include <ATen/ATen.h>

namespace trireme::test {

/// The norm of the difference by that of what is wanted, in double.
inline double relative_error(const at::Tensor& got, const at::Tensor& wanted) {
  const at::Tensor exact = wanted.to(at::kDouble);
  return ((got.to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

}  // namespace trireme::test
