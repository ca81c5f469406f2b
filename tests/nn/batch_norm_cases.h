#pragma once
// Batch norms with what follows them, beside at::batch_norm in fp64: outputs, gradients and running
// statistics.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <ostream>
#include <vector>

#include "trireme/nn/batch_norm.h"

namespace trireme::nn {

struct BatchNormCase {
  std::vector<int64_t> shape;
  bool residual = false, relu = false;
  double offset = 0.0;  ///< of all values of x

  friend void PrintTo(const BatchNormCase& test, std::ostream* out) {
    *out << at::IntArrayRef(test.shape) << (test.residual ? " residual" : "") << (test.relu ? " relu" : "")
         << " offset " << test.offset;
  }
};

inline std::vector<BatchNormCase> batch_norm_cases() {
  std::vector<BatchNormCase> cases;
  const std::vector<std::vector<int64_t>> shapes = {{2, 8, 2, 2},   {1, 16, 3, 3},   {5, 24, 7, 5},
                                                    {3, 64, 9, 11}, {2, 72, 33, 17}, {4, 256, 14, 14},
                                                    {2, 1032, 5, 5}};
  for (const auto& shape : shapes) {
    for (const bool residual : {false, true}) {
      for (const bool relu : {false, true}) cases.push_back({shape, residual, relu});
    }
  }
  cases.push_back({{4, 16, 16, 16}, true, true, 100.0});
  return cases;
}

struct BatchNormTensors {
  at::Tensor x, weight, bias, residual, dy, mean, variance;

  BatchNormTensors(const BatchNormCase& test, const c10::Device& device, at::ScalarType dtype) {
    at::manual_seed(static_cast<uint64_t>(test.shape[1]));
    const int64_t channels = test.shape[1];
    const auto leaf = [&](const at::Tensor& values) {
      const auto layout = values.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
      return values.to(device, dtype).contiguous(layout).detach().requires_grad_();
    };
    x = leaf(at::randn(test.shape) * 2.0 + test.offset);
    weight = leaf(at::rand({channels}) + 0.5);
    bias = leaf(at::randn({channels}));
    if (test.residual) residual = leaf(at::randn(test.shape));
    dy = at::randn(test.shape).to(device, dtype).contiguous(at::MemoryFormat::ChannelsLast);
    mean = at::randn({channels}).to(device);
    variance = (at::rand({channels}) + 0.5).to(device);
  }

  at::Tensor run(bool relu) {
    return batch_norm(x, weight, bias,
                      {.residual = residual, .running_mean = mean, .running_var = variance, .relu = relu});
  }
};

/// The largest difference, over the largest value of `wanted`.
inline double batch_norm_error(const at::Tensor& got, const at::Tensor& wanted) {
  return (got.detach().to(at::kDouble) - wanted).abs().max().item<double>() /
         std::max(1e-3, wanted.abs().max().item<double>());
}

inline void check_batch_norm(const BatchNormCase& test, const c10::Device& device, at::ScalarType dtype) {
  BatchNormTensors ours(test, device, dtype);
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.detach().to(at::kDouble) : tensor;
  };
  at::Tensor x = wide(ours.x).requires_grad_(), weight = wide(ours.weight).requires_grad_(),
             bias = wide(ours.bias).requires_grad_(), residual = wide(ours.residual);
  if (test.residual) residual.requires_grad_();
  at::Tensor mean = wide(ours.mean).clone(), variance = wide(ours.variance).clone();

  at::Tensor y = ours.run(test.relu);
  y.backward(ours.dy);
  at::Tensor wanted = at::batch_norm(x, weight, bias, mean, variance, true, 0.1, 1e-5, false);
  if (test.residual) wanted = wanted + residual;
  // Where rounding decides whether ReLU lets a gradient pass, ours decides for both.
  if (test.relu) wanted = wanted * wide(y).gt(0.0);
  wanted.backward(wide(ours.dy));

  const double unit = dtype == at::kFloat ? 1e-5 : dtype == at::kHalf ? 2e-3 : 1.2e-2;
  const double limit = unit * (1.0 + test.offset);
  EXPECT_LT(batch_norm_error(y, wanted.detach()), limit);
  EXPECT_LT(batch_norm_error(ours.x.grad(), x.grad()), limit);
  EXPECT_LT(batch_norm_error(ours.weight.grad(), weight.grad()), limit);
  EXPECT_LT(batch_norm_error(ours.bias.grad(), bias.grad()), limit);
  if (test.residual) {
    EXPECT_LT(batch_norm_error(ours.residual.grad(), residual.grad()), limit);
  }
  EXPECT_LT(batch_norm_error(ours.mean, mean), 1e-5);
  EXPECT_LT(batch_norm_error(ours.variance, variance), 1e-4);
}

inline void check_batch_norm_repeats(const BatchNormCase& test, const c10::Device& device,
                                     at::ScalarType dtype) {
  BatchNormTensors one(test, device, dtype), two(test, device, dtype);
  const at::Tensor first = one.run(test.relu), second = two.run(test.relu);
  first.backward(one.dy);
  second.backward(two.dy);
  EXPECT_TRUE(at::equal(first, second));
  EXPECT_TRUE(at::equal(one.x.grad(), two.x.grad()));
  EXPECT_TRUE(at::equal(one.weight.grad(), two.weight.grad()));
  EXPECT_TRUE(at::equal(one.variance, two.variance));
}

/// A value that is not finite shows in what comes out, also behind ReLU.
inline void check_batch_norm_keeps_nan(const c10::Device& device) {
  BatchNormTensors tensors({{2, 16, 4, 4}, false, true}, device, at::kFloat);
  {
    const c10::NoGradGuard no_grad;
    tensors.x.select(0, 0).select(0, 3).fill_(std::numeric_limits<double>::quiet_NaN());
  }
  EXPECT_TRUE(tensors.run(/*relu=*/true).isnan().any().item<bool>());
}

}  // namespace trireme::nn
