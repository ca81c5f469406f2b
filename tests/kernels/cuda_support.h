#pragma once
// Shared by the tests of CUDA kernels: inputs, comparison with a result in double, and the GPU or a skip.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "trireme/kernels/cuda_kernels.h"
#include "trireme/kernels/device.h"

namespace trireme::kernels::cuda {

inline Dtype dtype_of(at::ScalarType type) {
  if (type == at::kBFloat16) return Dtype::kBFloat16;
  return type == at::kHalf ? Dtype::kHalf : Dtype::kFloat;
}

inline float* floats(const at::Tensor& tensor) {
  return tensor.data_ptr<float>();
}

inline void* current_stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

/// Half an ulp of rounding to the dtype, with a little room for what fp32 arithmetic did before.
inline double relative_tolerance(at::ScalarType type) {
  if (type == at::kBFloat16) return 0x1.0p-8 * 1.02;
  return type == at::kHalf ? 0x1.0p-11 * 1.02 : 4e-6;
}

/// Normal random numbers on the GPU, the same for the same seed.
inline at::Tensor noise(at::IntArrayRef sizes, at::ScalarType type, uint64_t seed, double scale = 1.0) {
  const at::Tensor values =
      at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::TensorOptions().dtype(at::kFloat));
  return (values * scale).to(type).to(at::kCUDA);
}

inline at::Tensor in_double(const at::Tensor& tensor) {
  return tensor.cpu().to(at::kDouble);
}

/// A copy whose first element is not at a multiple of 16 bytes.
inline at::Tensor unaligned(const at::Tensor& tensor) {
  at::Tensor copy = at::empty({tensor.numel() + 1}, tensor.options()).narrow(0, 1, tensor.numel());
  copy.copy_(tensor.reshape({-1}));
  return copy.view(tensor.sizes());
}

/// |actual - exact| <= relative * |exact| + absolute in every element.
inline void expect_close(const at::Tensor& actual, const at::Tensor& exact, double relative, double absolute,
                         const std::string& what) {
  ASSERT_EQ(actual.sizes(), exact.sizes()) << what;
  const at::Tensor error = (in_double(actual) - exact).abs();
  const at::Tensor excess = (error - relative * exact.abs() - absolute).reshape({-1});
  if (excess.numel() == 0) return;
  const int64_t worst = excess.nan_to_num(1e300).argmax().item<int64_t>();
  EXPECT_LE(excess[worst].item<double>(), 0.0)
      << what << ": element " << worst << " is " << in_double(actual).reshape({-1})[worst].item<double>()
      << ", exactly " << exact.reshape({-1})[worst].item<double>();
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (gpus().empty()) GTEST_SKIP() << "no GPU";
  }
};

/// Tests that run once per dtype.
class CudaDtypeTest : public CudaTest, public testing::WithParamInterface<at::ScalarType> {
 protected:
  at::ScalarType type() const { return GetParam(); }
  Dtype dtype() const { return dtype_of(type()); }
  double relative() const { return relative_tolerance(type()); }
};

inline std::string dtype_name(const testing::TestParamInfo<at::ScalarType>& info) {
  return c10::toString(info.param);
}

/// For tests that need tensors of more than 2^31 elements.
inline bool has_memory_for(int64_t bytes) {
  return gpus().front().memory_bytes > bytes + bytes / 4;
}

}  // namespace trireme::kernels::cuda

#define TRIREME_FOR_EACH_DTYPE(Suite) \
  INSTANTIATE_TEST_SUITE_P(Dtypes, Suite, testing::Values(at::kFloat, at::kBFloat16, at::kHalf), dtype_name)
