// When activations are computed again by default.
#include "trireme/plan/recompute.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {
namespace {

Config with(std::vector<std::string> overrides) {
  overrides.emplace_back("precision.compute=bf16");
  return load({.path = {}, .text = {}, .overrides = overrides}, Environment()).config;
}

Recompute settled(const std::vector<std::string>& overrides, Device device = Device::kCuda) {
  return settle_recompute(with(overrides), device).memory.recompute;
}

TEST(SettledRecompute, IsCheapWhereThatIsHardlyNoticed) {
  const std::string long_rows = "data.seq_len=4096";
  EXPECT_EQ(settled({"model.preset=llama-8b", long_rows}), Recompute::kCheap);
  EXPECT_EQ(settled({"model.preset=llama-1b", long_rows}), Recompute::kCheap);
  EXPECT_EQ(settled({"model.preset=gpt2-124m", "data.seq_len=1024"}), Recompute::kNone);
  EXPECT_EQ(settled({"model.preset=gpt-tiny"}), Recompute::kNone);
  EXPECT_EQ(settled({"model.preset=llama-8b", long_rows}, Device::kCpu), Recompute::kNone);
  EXPECT_EQ(settled({"model.preset=llama-8b", long_rows, "precision.fp8=tensorwise"}), Recompute::kNone);
  EXPECT_EQ(settled({"model.preset=resnet18-cifar"}), Recompute::kNone) << "nothing is cheap there";
}

TEST(SettledRecompute, IsWhatWasAskedFor) {
  for (const Recompute asked : {Recompute::kNone, Recompute::kCheap, Recompute::kBlock}) {
    const std::string word = "memory.recompute=" + std::string(name(asked));
    EXPECT_EQ(settled({"model.preset=llama-8b", word}), asked);
    EXPECT_EQ(settled({"model.preset=gpt2-124m", word}), asked);
  }
}

/// Every third of 32 layers repeats: 11. The last product is not computed again, and attention only where it
/// is not kept.
TEST(RepeatedFlops, AreThoseOfForwardInBlocksThatAreComputedAgain) {
  const auto repeated = [](std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(), {"model.preset=llama-8b", "data.seq_len=4096"});
    return repeated_flops(with(overrides));
  };
  const double products = 2.0 * (4096.0 * 4096.0 * 2.5 + 2.0 * 4096.0 * 14336.0),
               attention = 2.0 * 4096.0 * 4096.0;
  EXPECT_EQ(repeated({"memory.recompute=none"}), 0.0);
  EXPECT_EQ(repeated({"memory.recompute=cheap"}), 0.0);
  EXPECT_DOUBLE_EQ(repeated({"memory.recompute=block"}), 32.0 * (products + attention));
  EXPECT_DOUBLE_EQ(repeated({"memory.recompute=all_but_attention"}), 32.0 * products);
  EXPECT_DOUBLE_EQ(repeated({"memory.recompute=block", "memory.recompute_every=3"}),
                   11.0 * (products + attention));
}

TEST(RepeatedFlops, OfImagesAreThoseOfTheirBlocks) {
  const Config config = with({"model.preset=resnet18-cifar", "memory.recompute=block"});
  const double forward = describe(config.model, config.data.seq_len).flops_per_token / 3.0;
  EXPECT_GT(repeated_flops(config), 0.9 * forward);
  EXPECT_LT(repeated_flops(config), forward);
}

/// Two norms of 2 * 4096 bytes read and written, and 2 * 14336 bytes of SwiGLU written, in each of 32 layers.
TEST(CheapCost, IsThatOfTheBytesItMoves) {
  const Config config = with({"model.preset=llama-8b", "data.seq_len=4096"});
  const double bytes = 32.0 * (4.0 * 2.0 * 4096.0 + 2.0 * 14336.0);
  const double flops = 6.0 * (32.0 * (4096.0 * 4096.0 * 2.5 + 3.0 * 4096.0 * 14336.0) + 128256.0 * 4096.0) +
                       6.0 * 4096.0 * 4096.0 * 32.0;
  EXPECT_NEAR(cheap_cost(config), 130.0 * bytes / flops, 1e-6);
  const Config half = with({"model.preset=llama-8b", "data.seq_len=4096", "memory.recompute_every=2"});
  EXPECT_NEAR(cheap_cost(half), cheap_cost(config) / 2.0, 1e-9);
  EXPECT_TRUE(std::isinf(cheap_cost(with({"model.preset=resnet18-cifar"}))));
}

}  // namespace
}  // namespace trireme::plan
