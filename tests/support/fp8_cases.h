#pragma once
// What tests of FP8 sweep on CPUs and GPUs: casts, products and recipes.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "trireme/nn/fp8.h"

namespace trireme::test {

using kernels::Fp8Cast;
using kernels::Fp8Format;
using kernels::Fp8Scaling;

struct Fp8Case {
  std::string name;
  Fp8Cast cast;
};

inline std::vector<Fp8Case> fp8_casts() {
  std::vector<Fp8Case> cases;
  for (const Fp8Format format : {Fp8Format::kE4m3, Fp8Format::kE5m2}) {
    const std::string suffix = format == Fp8Format::kE4m3 ? " e4m3" : " e5m2";
    cases.push_back({"tensor" + suffix, {Fp8Scaling::kTensor, format, false}});
    cases.push_back({"row" + suffix, {Fp8Scaling::kRow, format, false}});
    cases.push_back({"row block" + suffix, {Fp8Scaling::kBlock, format, false}});
    cases.push_back({"square block" + suffix, {Fp8Scaling::kBlock, format, true}});
  }
  return cases;
}

/// Normal noise whose magnitude differs between rows and columns by powers of two, as gradients' does; bf16.
inline at::Tensor wide_values(int64_t rows, int64_t columns, uint64_t seed) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::Tensor noise = at::randn({rows, columns}, generator, at::TensorOptions().dtype(at::kFloat));
  const auto steps = [](int64_t count) {
    return at::exp2(at::arange(count).remainder(7).to(at::kFloat) - 3.0);
  };
  return (noise * steps(rows).unsqueeze(1) * steps(columns)).to(at::kBFloat16);
}

/// A product of forward or backward.
struct Fp8Product {
  std::string name;
  Fp8Cast a, b;
};

/// What layers multiply: activations with weights, gradients with weights, gradients with activations.
inline std::vector<Fp8Product> fp8_products() {
  std::vector<Fp8Product> products;
  const std::pair<const char*, Fp8Scaling> scalings[] = {
      {"tensorwise", Fp8Scaling::kTensor}, {"rowwise", Fp8Scaling::kRow}, {"blockwise", Fp8Scaling::kBlock}};
  for (const auto& [name, scaling] : scalings) {
    const Fp8Cast activations{scaling, Fp8Format::kE4m3, false}, weights{scaling, Fp8Format::kE4m3, true};
    const Fp8Cast wide{scaling, Fp8Format::kE5m2, false};
    const std::string text = name;
    products.push_back({text + " with weights", activations, weights});
    products.push_back({text + " with activations", activations, activations});
    products.push_back({text + " e5m2 with weights", wide, weights});
    products.push_back({text + " e5m2 with activations", wide, activations});
    products.push_back({text + " activations with e5m2", activations, wide});
  }
  return products;
}

struct Fp8Operands {
  kernels::Fp8Matrix a, b;
};

/// (m, k) and (n, k) of `product`.
inline Fp8Operands operands_of(const Fp8Product& product, int64_t m, int64_t n, int64_t k,
                               at::Device device = at::kCPU) {
  const auto cast = [&](int64_t rows, const Fp8Cast& how, uint64_t seed) {
    const at::Tensor x = wide_values(rows, k, seed).to(device);
    return fp8_cast(x, fp8_amax(x, how.scaling), how, kernels::Fp8Copy::kPlain).plain;
  };
  return {cast(m, product.a, 1), cast(n, product.b, 2)};
}

/// A product in double, rounded once; sums in fp32 may differ by what cancels.
inline void expect_near_product(const at::Tensor& got, const at::Tensor& exact, const std::string& what,
                                double of_largest = 1e-5) {
  const double rounding = got.scalar_type() == at::kBFloat16 ? 0x1.0p-8 : 1e-6;
  const at::Tensor error = (got.to(exact.device(), at::kDouble) - exact).abs();
  const at::Tensor allowed = rounding * 1.02 * exact.abs() + of_largest * exact.abs().max();
  EXPECT_LE((error - allowed).max().item<double>(), 0.0) << what;
}

inline std::vector<nn::Fp8Recipe> fp8_recipes() {
  return {{.scaling = Fp8Scaling::kTensor},
          {.scaling = Fp8Scaling::kTensor, .gradients = Fp8Format::kE5m2, .fast_backward = true},
          {.scaling = Fp8Scaling::kRow, .fast_forward = false},
          {.scaling = Fp8Scaling::kBlock}};
}

}  // namespace trireme::test
