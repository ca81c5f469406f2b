// FP8 on a GPU: models against those of a CPU, and largest magnitudes that producers find against those that
// the casts find. Skipped without a GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/nn/fp8_models.h"
#include "tests/support/fp8_cases.h"
#include "trireme/kernels/device.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/notes.h"

namespace trireme::nn {
namespace {

class GpuFp8 : public testing::Test {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  }
  static bool lacks(const Fp8Recipe& recipe) {
    return !kernels::fp8_lack(at::Device(at::kCUDA, 0), recipe.scaling).empty();
  }
};

constexpr plan::ModelFamily kFamilies[] = {plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama};

TEST_F(GpuFp8, ModelsAreThoseOfTheCpu) {
  for (const plan::ModelFamily family : kFamilies) {
    for (const Fp8Recipe& recipe : test::fp8_recipes()) {
      if (lacks(recipe)) continue;
      for (const bool head : {false, true}) {
        const Fp8Pass cpu = pass_of({.family = family, .recipe = recipe, .head = head});
        const Fp8Pass gpu = pass_of({.family = family, .recipe = recipe, .head = head, .device = at::kCUDA});
        EXPECT_NEAR(gpu.loss, cpu.loss, head ? 1e-2 : 5e-3);
        for (const auto& [name, gradient] : cpu.gradients) {
          // Sums in another order round other values up or down.
          EXPECT_LT(test::relative_error(gpu.gradients.at(name).cpu(), gradient), 0.25)
              << name << " head " << head;
        }
      }
    }
  }
}

TEST_F(GpuFp8, GradientsOfLogitsAreThoseOfTheCpu) {
  if (lacks({})) GTEST_SKIP() << "no FP8";
  constexpr int64_t kRows = 192, kScale = 3;
  for (const int64_t classes : {1000, 1024, 40'000}) {
    const int64_t columns = (classes + 63) / 64 * 64;
    at::manual_seed(7);
    const at::Tensor logits = (4 * at::randn({kRows, columns})).to(at::kBFloat16);
    const at::Tensor targets = at::randint(classes, {kRows}, at::kLong);
    targets[5] = -100;
    const auto results = [&](at::Device device) {
      at::Tensor loss = at::empty({kRows}, at::TensorOptions().dtype(at::kFloat).device(device));
      at::Tensor scores = logits.to(device, at::kBFloat16, false, true);
      const kernels::Fp8Copies copies =
          kernels::fp8_cross_entropy(loss, scores, classes, targets.to(device), kScale);
      EXPECT_TRUE(at::equal(copies.transposed.values.view(at::kByte),
                            copies.plain.values.view(at::kByte).t().contiguous()));
      return std::pair(loss.cpu(),
                       kernels::dequantized({copies.plain.values.cpu(), copies.plain.scale.cpu()}));
    };
    const auto [loss, gradients] = results(at::kCPU);
    const auto [gpu_loss, gpu_gradients] = results(at::kCUDA);
    EXPECT_LT((gpu_loss - loss).abs().max().item<double>(), 1e-3) << classes;
    EXPECT_LT(test::relative_error(gpu_gradients, gradients), 0.03)
        << classes;  // a CPU rounds to bf16 before
    EXPECT_EQ(gpu_gradients[5].abs().max().item<double>(), 0.0) << "an ignored row";
    EXPECT_EQ(gpu_gradients.slice(1, classes).abs().sum().item<double>(), 0.0) << "padding";
  }
}

TEST_F(GpuFp8, ATargetThatIsNoClassGivesNanInItsRowAlone) {
  if (lacks({})) GTEST_SKIP() << "no FP8";
  at::Tensor loss = at::empty({32}, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA));
  at::Tensor scores = at::randn({32, 64}, loss.options()).to(at::kBFloat16);
  at::Tensor targets = at::zeros({32}, loss.options().dtype(at::kLong));
  targets[3] = 64;
  const kernels::Fp8Copies copies = kernels::fp8_cross_entropy(loss, scores, 64, targets, 1.0);
  const at::Tensor bad = kernels::dequantized(copies.plain).isnan();
  EXPECT_TRUE(bad[3].all().item<bool>() && loss[3].isnan().item<bool>());
  EXPECT_EQ(bad.sum().item<int64_t>(), 64);
}

TEST_F(GpuFp8, WhatIsComputedAgainOrLaterHasTheSameBits) {
  for (const plan::ModelFamily family : kFamilies) {
    for (const Fp8Recipe& recipe : test::fp8_recipes()) {
      if (lacks(recipe)) continue;
      const Fp8Setting plain{.family = family,
                             .recipe = recipe,
                             .lends = true,
                             .head = true,
                             .micro_batches = 2,
                             .device = at::kCUDA};
      const Fp8Pass wanted = pass_of(plain);
      expect_same_bits(pass_of(plain), wanted, "again");
      Fp8Setting cheap = plain, deferred = plain;
      cheap.cheap = deferred.defers = true;
      expect_same_bits(pass_of(cheap), wanted, "recomputed");
      expect_same_bits(pass_of(deferred), wanted, "deferred");
    }
  }
}

TEST_F(GpuFp8, ScaledByTheSameStepBeforeAreThoseScaledByTheirOwn) {
  for (const plan::ModelFamily family : kFamilies) {
    const Fp8Setting own{.family = family, .recipe = Fp8Recipe(), .micro_batches = 1, .device = at::kCUDA};
    Fp8Setting delayed = own;
    delayed.delayed = true;
    const Fp8Pass wanted = pass_of(own);
    expect_same_bits(pass_of(delayed), wanted, "delayed");
    for (const bool cheap : {false, true}) {
      Fp8Setting later = delayed;
      later.cheap = cheap;
      later.defers = true;
      expect_same_bits(pass_of(later), wanted, cheap ? "delayed, recomputed, deferred" : "delayed, deferred");
    }
  }
}

at::Tensor noise(at::IntArrayRef sizes) {
  return at::randn(sizes, at::TensorOptions().device(at::kCUDA)).to(at::kBFloat16);
}

/// Whether what is noted with `tensor` is what a cast would find.
::testing::AssertionResult knows_amax(const at::Tensor& tensor) {
  const at::Tensor noted = noted_amax(tensor, Fp8Recipe());
  if (!noted.defined()) return ::testing::AssertionFailure() << "nothing is noted";
  const at::Tensor found =
      kernels::fp8_amax(tensor.detach().reshape({-1, tensor.size(-1)}), kernels::Fp8Scaling::kTensor);
  if (at::equal(noted, found)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << noted.item<float>() << " is noted of " << found.item<float>();
}

TEST_F(GpuFp8, ProducersKnowTheLargestMagnitudeOfOutputsAndGradients) {
  at::manual_seed(5);
  for (const int64_t width : {64, 768, 2048, 8192}) {
    const at::Tensor x = noise({2, 48, width}).requires_grad_(), delta = noise({2, 48, width});
    const at::Tensor weight = noise({width}).requires_grad_(), bias = noise({width}).requires_grad_();
    const auto check = [&](const at::Tensor& y, const std::string& what) {
      EXPECT_TRUE(knows_amax(y)) << what << ", width " << width;
      const at::Tensor dx = torch::autograd::grad({y}, {x}, {at::randn_like(y)})[0];
      EXPECT_TRUE(knows_amax(dx)) << "gradient of " << what << ", width " << width;
    };
    const Fp8Recipe recipe;
    check(add_rms_norm(x, delta, weight, 1e-5, recipe).second, "RMSNorm");
    check(add_layer_norm(x, delta, weight, bias, 1e-5, recipe).second, "LayerNorm");
    check(nn::swiglu(x, recipe), "SwiGLU");
    check(nn::gelu(x, recipe), "GELU");
  }
}

TEST_F(GpuFp8, OnlyWhatIsAskedForAndStillTrueIsNoted) {
  const at::Tensor x = noise({48, 64});
  EXPECT_FALSE(noted_amax(nn::gelu(x), Fp8Recipe()).defined());
  const Fp8Recipe by_row{.scaling = kernels::Fp8Scaling::kRow};
  EXPECT_FALSE(noted_amax(nn::gelu(x, by_row), by_row).defined());
  at::Tensor y = nn::gelu(x, Fp8Recipe());
  EXPECT_FALSE(noted_amax(y, {}).defined()) << "the reader needs none";
  EXPECT_FALSE(noted_amax(y.detach(), Fp8Recipe()).defined());
  EXPECT_TRUE(knows_amax(y));
  y.mul_(2.0);
  EXPECT_FALSE(noted_amax(y, Fp8Recipe()).defined()) << "it was written to";
}

}  // namespace
}  // namespace trireme::nn
