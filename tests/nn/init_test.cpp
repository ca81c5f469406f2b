#include "trireme/nn/init.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <numeric>

#include "trireme/base/hash.h"

namespace trireme::nn {
namespace {

std::vector<float> values(const std::string& name, int64_t first, size_t count, uint64_t seed = 1) {
  plan::ModelConfig config;
  config.n_layers = 8;
  config.d_model = 1000;  // at this width the deviation is 0.02
  at::Tensor out = at::empty({static_cast<int64_t>(count)});
  initial_values(config, seed, name, first, out);
  return {out.const_data_ptr<float>(), out.const_data_ptr<float>() + count};
}

TEST(Init, AnyPartOfAParameterEqualsThatPartOfTheWhole) {
  const std::vector<float> whole = values("transformer.wte.weight", 0, 1000);
  for (const auto& [first, count] : {std::pair{0, 1}, std::pair{17, 400}, std::pair{999, 1}}) {
    const std::vector<float> part = values("transformer.wte.weight", first, static_cast<size_t>(count));
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + first));
  }
}

TEST(Init, DependsOnSeedAndName) {
  EXPECT_NE(values("a.weight", 0, 4), values("b.weight", 0, 4));
  EXPECT_NE(values("a.weight", 0, 4, 1), values("a.weight", 0, 4, 2));
}

TEST(Init, MatricesAreNormalWithTheStatedDeviation) {
  const auto moments = [](const std::vector<float>& sample) {
    double mean = 0.0, square = 0.0, fourth = 0.0;
    for (const float x : sample) {
      mean += x;
      square += static_cast<double>(x) * x;
      fourth += std::pow(x, 4);
    }
    const double n = static_cast<double>(sample.size());
    return std::tuple{mean / n, std::sqrt(square / n), fourth / n / std::pow(square / n, 2)};
  };
  const auto [mean, deviation, kurtosis] = moments(values("transformer.wte.weight", 0, 200000));
  EXPECT_NEAR(mean, 0.0, 5 * 0.02 / std::sqrt(200000.0));
  EXPECT_NEAR(deviation, 0.02, 0.02 * 0.01);
  EXPECT_NEAR(kurtosis, 3.0, 0.06);
  const double residual = std::get<1>(moments(values("transformer.h.0.attn.c_proj.weight", 0, 200000)));
  EXPECT_NEAR(residual, 0.02 / std::sqrt(2.0 * 8), 0.02 * 0.01);
}

TEST(Init, NumbersAreThoseOfTheFormula) {
  const std::vector<float> sample = values("a.weight", 0, 10000);
  for (size_t i = 0; i < sample.size(); ++i) {
    const uint64_t bits = mix64(xxh3(std::string_view("a.weight"), 1), i);
    const double u = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
    const double v = (static_cast<double>(bits & 0xffffffff) + 0.5) * 0x1p-32;
    const double exact = 0.02 * std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
    EXPECT_NEAR(sample[i], exact, 6.1e-8 * std::abs(exact) + 1e-14) << i;
  }
}

TEST(Init, NormsStartAtOneAndBiasesAtZero) {
  EXPECT_EQ(values("transformer.h.3.ln_1.weight", 0, 3), std::vector<float>(3, 1.0f));
  EXPECT_EQ(values("model.norm.weight", 0, 3), std::vector<float>(3, 1.0f));
  EXPECT_EQ(values("model.layers.0.post_attention_layernorm.weight", 0, 3), std::vector<float>(3, 1.0f));
  EXPECT_EQ(values("transformer.h.3.ln_1.bias", 0, 3), std::vector<float>(3, 0.0f));
  EXPECT_EQ(values("transformer.h.3.mlp.c_fc.bias", 0, 3), std::vector<float>(3, 0.0f));
}

}  // namespace
}  // namespace trireme::nn
