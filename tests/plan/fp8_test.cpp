// What a config says about FP8: its words, its contradictions, the shapes that cannot, and what is kept for
// backward.
#include "trireme/plan/fp8.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {
namespace {

using ::testing::HasSubstr;

Config given(const std::vector<std::string>& overrides) {
  return load({.overrides = overrides}, Environment()).config;
}

std::vector<std::string> with_fp8(std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), {"precision.compute=bf16", "precision.fp8=tensorwise"});
  return overrides;
}

std::string refusal_of(const std::vector<std::string>& overrides) {
  try {
    given(overrides);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing was refused";
}

ModelFacts facts_of(const Config& config) {
  return describe(config.model, config.data.seq_len, config.precision, config.memory);
}

TEST(Fp8Plan, BlocksInBf16AreWrittenAsTheyAreRead) {
  for (const char* text : {"none", "first", "last", "first,last", "3", "first,last,0,7"}) {
    const std::optional<Fp8Skip> skip = parse_skip(text);
    ASSERT_TRUE(skip) << text;
    EXPECT_EQ(to_text(*skip), text);
  }
  for (const char* text : {"", "all", "first,", "-1", "1.5", "none,1", "first last"}) {
    EXPECT_FALSE(parse_skip(text)) << text;
  }
}

TEST(Fp8Plan, ABlockIsMultipliedUnlessItIsNamed) {
  Fp8Config fp8{.recipe = Fp8::kRowwise, .skip = *parse_skip("first,last,2")};
  std::vector<bool> multiplied;
  for (int64_t block = 0; block < 5; ++block) multiplied.push_back(multiplies_in_fp8(fp8, block, 5));
  EXPECT_EQ(multiplied, std::vector<bool>({false, true, false, true, false}));
  fp8.recipe = Fp8::kOff;
  EXPECT_FALSE(multiplies_in_fp8(fp8, 1, 5));
}

TEST(Fp8Plan, ContradictionsAreRefusedWithAWayOut) {
  EXPECT_THAT(refusal_of({"precision.fp8=tensorwise"}), HasSubstr("set precision.compute to bf16"));
  EXPECT_THAT(refusal_of(with_fp8({"precision.compute=fp16"})), HasSubstr("precision.compute=fp16"));
  EXPECT_THAT(refusal_of(with_fp8({"model.family=mlp"})), HasSubstr("set precision.fp8 to off"));
  EXPECT_THAT(refusal_of(with_fp8({"model.family=resnet"})), HasSubstr("set precision.fp8 to off"));
  for (const char* hook : {"fp16", "int8", "topk", "powersgd"}) {
    EXPECT_THAT(refusal_of(with_fp8({fmt::format("parallel.comm_hook={}", hook)})),
                HasSubstr("set parallel.comm_hook to none"));
  }
  EXPECT_THAT(refusal_of(with_fp8({"model.n_layers=4", "precision.fp8_skip=first,4"})),
              HasSubstr("lists block 4"));
  EXPECT_THAT(refusal_of(with_fp8({"precision.fp8=e4m3"})), HasSubstr("tensorwise"));
  for (const char* recipe : {"precision.fp8=rowwise", "precision.fp8=blockwise"}) {
    EXPECT_THAT(refusal_of(with_fp8({recipe, "precision.fp8_scaling=delayed"})),
                HasSubstr("set precision.fp8=tensorwise or precision.fp8_scaling=dynamic"));
  }
  EXPECT_THAT(refusal_of(with_fp8({"precision.fp8_scaling=delayed", "parallel.comm_hook=local_sgd"})),
              HasSubstr("do not communicate in every step; set precision.fp8_scaling=dynamic"));
  EXPECT_THAT(refusal_of(with_fp8({"precision.fp8_scaling=delayed", "precision.fp8_history=0"})),
              HasSubstr("precision.fp8_history"));
  EXPECT_NO_THROW(given(with_fp8({"precision.fp8_scaling=delayed"})));
  EXPECT_NO_THROW(
      given(with_fp8({"parallel.comm_hook=local_sgd", "parallel.policy=ddp", "precision.fp8_skip=3"})));
}

TEST(Fp8Plan, ShapesThatAreNoMultipleAreNamed) {
  const auto obstacle = [](const std::vector<std::string>& overrides, int64_t micro_batch) {
    const Config config = given(with_fp8(overrides));
    return fp8_obstacle(config, facts_of(config), micro_batch);
  };
  const std::vector<std::string> fits = {"model.d_model=128", "model.n_heads=4", "data.seq_len=64"};
  EXPECT_EQ(obstacle(fits, 2), "");
  EXPECT_THAT(
      obstacle({"model.d_model=120", "model.n_heads=4"}, 4),
      HasSubstr("transformer.h.0.attn.c_attn.weight is 120 x 360, but sizes must be multiples of 16"));
  EXPECT_THAT(obstacle({"model.d_model=128", "model.d_ff=500"}, 4),
              HasSubstr("mlp.c_fc.weight is 128 x 500"));
  EXPECT_THAT(obstacle({"model.d_model=128", "data.seq_len=33"}, 3),
              HasSubstr("3 x 33 = 99 tokens on a rank, which must be a multiple of 16"));
  auto blocks = fits;
  blocks.emplace_back("precision.fp8=blockwise");
  EXPECT_EQ(obstacle(blocks, 2), "");
  EXPECT_THAT(obstacle(blocks, 1), HasSubstr("64 tokens on a rank, which must be a multiple of 128"));
  const Config off = given({"model.d_model=120", "model.n_heads=4"});
  EXPECT_EQ(fp8_obstacle(off, facts_of(off), 1), "") << "without FP8 every shape will do";
}

/// Of a Llama: in bf16 the inputs of both norms, their outputs, q k v, attention's output, gate, up and their
/// product. In FP8 the outputs of norms and the product take a byte, and attention's output one more.
TEST(Fp8Plan, InputsOfProductsAreKeptInAByte) {
  const int64_t d = 256, kv = 128, f = 512, heads = 4, layers = 4;
  const auto kept = [&](const std::vector<std::string>& overrides) {
    std::vector<std::string> all = {"precision.compute=bf16", "model.family=llama", "model.d_model=256",
                                    "model.n_heads=4",        "model.n_kv_heads=2", "model.d_ff=512",
                                    "model.n_layers=4"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return facts_of(given(all)).saved_bytes_per_token;
  };
  const double bf16 = 2 * (6 * d + 2 * kv + 3 * f) + 4 * heads;
  const double fp8 = 2 * (4 * d + 2 * kv + 2 * f) + (2 * d + f) + d + 4 * heads;
  EXPECT_DOUBLE_EQ(kept({}), layers * bf16);
  EXPECT_DOUBLE_EQ(kept({"precision.fp8=tensorwise"}), layers * fp8);
  EXPECT_DOUBLE_EQ(kept({"precision.fp8=tensorwise", "precision.fp8_skip=first,last"}), 2 * bf16 + 2 * fp8);
  const double cheap = 2 * (4 * d + 2 * kv + 2 * f) + d + 4 * heads;
  EXPECT_DOUBLE_EQ(kept({"precision.fp8=rowwise", "memory.recompute=cheap"}), layers * cheap);
  EXPECT_DOUBLE_EQ(kept({"precision.fp8=rowwise", "memory.recompute=block"}), layers * 2 * d);
}

/// A rank along tp keeps the outputs of norms in bf16: a copy in FP8 would have the rows of all ranks.
TEST(Fp8Plan, InputsOfCutLayersAreKeptAsRows) {
  const int64_t d = 256, kv = 128, f = 512, heads = 4, layers = 4;
  const auto kept = [&](const std::vector<std::string>& overrides, const TensorSplit& split) {
    std::vector<std::string> all = {"precision.compute=bf16",   "model.family=llama", "model.d_model=256",
                                    "model.n_heads=4",          "model.n_kv_heads=2", "model.d_ff=512",
                                    "precision.fp8=tensorwise", "model.n_layers=4"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    const Config config = given(all);
    return describe(config.model, config.data.seq_len, config.precision, config.memory, split)
        .saved_bytes_per_token;
  };
  const double whole = 2 * (4 * d + 2 * kv + 2 * f) + (2 * d + f) + d + 4 * heads, cut = whole + 2 * d;
  const double bf16 = 2 * (6 * d + 2 * kv + 3 * f) + 4 * heads;
  EXPECT_DOUBLE_EQ(kept({}, {.ranks = 1, .contexts = 2}), layers * whole / 2);
  EXPECT_DOUBLE_EQ(kept({}, {.ranks = 2}), layers * cut / 2);
  EXPECT_DOUBLE_EQ(kept({"precision.fp8_skip=first"}, {.ranks = 2, .contexts = 2}), (bf16 + 3 * cut) / 4);
  const double cheap = 2 * (4 * d + 2 * kv + 2 * f) + d + 4 * heads;
  EXPECT_DOUBLE_EQ(kept({"memory.recompute=cheap"}, {.ranks = 2}), layers * cheap / 2);
  EXPECT_DOUBLE_EQ(kept({"memory.recompute=block"}, {.ranks = 2}), layers * d);
}

TEST(Fp8Memory, HeadCastsItsWeightAndGradientsOfLogitsTwice) {
  const auto logits = [](std::vector<std::string> overrides, int64_t vocab = 512) {
    std::vector<std::string> all = {
        "model.family=llama",   "model.d_model=256",      "model.n_layers=2",
        "model.n_heads=4",      "data.seq_len=128",       "train.micro_batch=2",
        "train.global_batch=2", "precision.compute=bf16", fmt::format("model.vocab_size={}", vocab)};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return rank_bytes(given(all), 1, Device::kCuda).logits;
  };
  const int64_t part = int64_t{256} * 512 * 2;
  const int64_t gradients = (256 + 512) * 256 * 2;  // of the rows and of the weight
  EXPECT_EQ(logits({"precision.fp8=rowwise"}), part + gradients);
  EXPECT_EQ(logits({"precision.fp8_head=true"}), part + gradients);
  EXPECT_EQ(logits({"precision.fp8=rowwise", "precision.fp8_head=true"}),
            2 * part + 2 * 512 * 256 + gradients);
  // Blocks of 128 add 64 rows to 576, in a copy in bf16.
  EXPECT_EQ(logits({"precision.fp8=blockwise", "precision.fp8_head=true"}, 576),
            2 * (256 * 640 * 2) + 2 * 640 * 256 + 640 * 256 * 2 + (256 + 640) * 256 * 2);
}

}  // namespace
}  // namespace trireme::plan
