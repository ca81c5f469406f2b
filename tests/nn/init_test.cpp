#include "trireme/nn/init.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numbers>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/nn/language_model.h"
#include "trireme/plan/model_family.h"

namespace trireme::nn {
namespace {

using Values = std::vector<float>;

plan::Shape shape_of(const plan::ModelConfig& config, const std::string& name) {
  for (const plan::UnitSpec& unit : plan::describe(config, config.max_seq_len).units) {
    for (const plan::ParamSpec& param : unit.params)
      if (param.name == name) return param.shape;
  }
  return {};
}

/// Elements of a parameter of a GPT-2 at whose width the deviation of matrices is 0.02.
Values values(const std::string& name, int64_t first, size_t count, uint64_t seed = 1) {
  const plan::ModelConfig config{.n_layers = 8, .d_model = 1000, .max_seq_len = 8};
  at::Tensor out = at::empty({static_cast<int64_t>(count)});
  const plan::Range range{first, first + static_cast<int64_t>(count)};
  InitialWeights(config, seed)(name, plan::Region::flat(shape_of(config, name), range), out);
  return {out.const_data_ptr<float>(), out.const_data_ptr<float>() + count};
}

const std::string kTable = "transformer.wte.weight";

TEST(Init, AnyPartOfAParameterEqualsThatPartOfTheWhole) {
  const Values whole = values(kTable, 0, 1000);
  for (const auto& [first, count] : {std::pair{0, 1}, std::pair{17, 400}, std::pair{999, 1}}) {
    const Values part = values(kTable, first, static_cast<size_t>(count));
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + first));
  }
}

/// Columns of a matrix, and a range of their elements, are those of the whole matrix.
TEST(Init, AnyBoxOfAParameterEqualsThatBoxOfTheWhole) {
  const plan::ModelConfig config{.n_layers = 2, .d_model = 24};
  const InitialWeights initial(config, 5);
  const std::string name = "transformer.h.1.mlp.c_fc.weight";
  const plan::Shape shape = shape_of(config, name);
  at::Tensor whole = at::empty({shape[0] * shape[1]});
  initial(name, plan::Region::whole(shape), whole);
  plan::Region columns = plan::Region::box({3, 8}, {7, 16});
  columns.range = {5, 100};
  at::Tensor part = at::empty({columns.numel()});
  initial(name, columns, part);
  const at::Tensor expected =
      whole.view(shape).narrow(0, 3, 7).narrow(1, 8, 16).reshape({-1}).slice(0, 5, 100);
  EXPECT_TRUE(at::equal(part, expected));
}

TEST(Init, RefusesARegionThatIsNoPartOfTheParameter) {
  const InitialWeights initial(plan::ModelConfig{.n_layers = 2, .d_model = 24}, 5);
  at::Tensor out = at::empty({4});
  EXPECT_THROW(initial("transformer.h.1.mlp.c_fc.weight", plan::Region::box({0, 95}, {2, 2}), out),
               LogicError);
  EXPECT_THROW(initial("transformer.h.1.ln_1.weight", plan::Region::box({0, 0}, {2, 2}), out), LogicError);
}

TEST(Init, DependsOnSeedAndName) {
  EXPECT_NE(values(kTable, 0, 4), values("transformer.wpe.weight", 0, 4));
  EXPECT_NE(values(kTable, 0, 4, 1), values(kTable, 0, 4, 2));
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
  const auto [mean, deviation, kurtosis] = moments(values(kTable, 0, 200000));
  EXPECT_NEAR(mean, 0.0, 5 * 0.02 / std::sqrt(200000.0));
  EXPECT_NEAR(deviation, 0.02, 0.02 * 0.01);
  EXPECT_NEAR(kurtosis, 3.0, 0.06);
  const double residual = std::get<1>(moments(values("transformer.h.0.attn.c_proj.weight", 0, 200000)));
  EXPECT_NEAR(residual, 0.02 / std::sqrt(2.0 * 8), 0.02 * 0.01);
}

TEST(Init, NumbersAreThoseOfTheFormula) {
  const Values sample = values(kTable, 0, 10000);
  for (size_t i = 0; i < sample.size(); ++i) {
    const uint64_t bits = mix64(xxh3(std::string_view(kTable), 1), i);
    const double u = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
    const double v = (static_cast<double>(bits & 0xffffffff) + 0.5) * 0x1p-32;
    const double exact = 0.02 * std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
    EXPECT_NEAR(sample[i], exact, 6.1e-8 * std::abs(exact) + 1e-14) << i;
  }
}

/// What parameters start from by the papers: norms at 1, biases at 0, matrices normal, and those that end a
/// residual branch smaller by sqrt(2 n_layers). Every name of a block is listed, none is guessed.
TEST(Init, EveryParameterOfAFamilyStartsAsItsPaperSays) {
  enum class Start { kOne, kZero, kMatrix, kResidual };
  using Starts = std::map<std::string, Start>;
  const std::map<plan::ModelFamily, Starts> wanted = {
      {plan::ModelFamily::kGpt2,
       {{"transformer.wte.weight", Start::kMatrix},
        {"transformer.wpe.weight", Start::kMatrix},
        {"transformer.h.0.ln_1.weight", Start::kOne},
        {"transformer.h.0.ln_1.bias", Start::kZero},
        {"transformer.h.0.attn.c_attn.weight", Start::kMatrix},
        {"transformer.h.0.attn.c_attn.bias", Start::kZero},
        {"transformer.h.0.attn.c_proj.weight", Start::kResidual},
        {"transformer.h.0.attn.c_proj.bias", Start::kZero},
        {"transformer.h.0.ln_2.weight", Start::kOne},
        {"transformer.h.0.ln_2.bias", Start::kZero},
        {"transformer.h.0.mlp.c_fc.weight", Start::kMatrix},
        {"transformer.h.0.mlp.c_fc.bias", Start::kZero},
        {"transformer.h.0.mlp.c_proj.weight", Start::kResidual},
        {"transformer.h.0.mlp.c_proj.bias", Start::kZero},
        {"transformer.ln_f.weight", Start::kOne},
        {"transformer.ln_f.bias", Start::kZero},
        {"lm_head.weight", Start::kMatrix}}},
      {plan::ModelFamily::kLlama,
       {{"model.embed_tokens.weight", Start::kMatrix},
        {"model.layers.0.input_layernorm.weight", Start::kOne},
        {"model.layers.0.self_attn.q_proj.weight", Start::kMatrix},
        {"model.layers.0.self_attn.k_proj.weight", Start::kMatrix},
        {"model.layers.0.self_attn.v_proj.weight", Start::kMatrix},
        {"model.layers.0.self_attn.o_proj.weight", Start::kResidual},
        {"model.layers.0.post_attention_layernorm.weight", Start::kOne},
        {"model.layers.0.mlp.gate_proj.weight", Start::kMatrix},
        {"model.layers.0.mlp.up_proj.weight", Start::kMatrix},
        {"model.layers.0.mlp.down_proj.weight", Start::kResidual},
        {"model.norm.weight", Start::kOne},
        {"lm_head.weight", Start::kMatrix}}},
      {plan::ModelFamily::kMlp,
       {{"embed.weight", Start::kMatrix},
        {"blocks.0.norm.weight", Start::kOne},
        {"blocks.0.up.weight", Start::kMatrix},
        {"blocks.0.down.weight", Start::kResidual},
        {"norm.weight", Start::kOne},
        {"lm_head.weight", Start::kMatrix}}}};
  for (const plan::ModelFamily family : plan::language_families()) {
    plan::ModelConfig config{.family = family, .n_layers = 1, .d_model = 96, .tie_embeddings = false};
    config = plan::complete(config, 64);
    const double deviation = std::sqrt(2.0 / (5.0 * 96));
    const auto model = build(config);
    InitialWeights(config, 3).fill(*model);
    Starts seen;
    for (const auto& entry : model->named_parameters()) {
      const at::Tensor value = entry.value().detach().to(at::kDouble);
      const double mean = value.mean().item<double>();
      const double spread = (value - mean).square().mean().sqrt().item<double>();
      const bool residual = std::abs(spread / deviation * std::numbers::sqrt2 - 1.0) < 0.05;
      seen[entry.key()] = spread == 0.0 ? (mean == 1.0 ? Start::kOne : Start::kZero)
                          : residual    ? Start::kResidual
                                        : Start::kMatrix;
      if (spread == 0.0) {
        EXPECT_TRUE(mean == 0.0 || mean == 1.0) << entry.key();
      } else if (!residual) {
        EXPECT_NEAR(spread / deviation, 1.0, 0.05) << entry.key();
      }
    }
    EXPECT_EQ(seen, wanted.at(family)) << plan::name(family);
  }
}

TEST(Init, RefusesNamesThatTheModelDoesNotHave) {
  EXPECT_THROW(values("transformer.h.8.ln_1.weight", 0, 1), LogicError) << "layers are 0 to 7";
}

}  // namespace
}  // namespace trireme::nn
