#include "trireme/plan/model_facts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "trireme/base/error.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/presets.h"

namespace trireme::plan {
namespace {

const ParamSpec& find_param(const ModelFacts& facts, const std::string& name) {
  for (const UnitSpec& unit : facts.units) {
    for (const ParamSpec& param : unit.params) {
      if (param.name == name) return param;
    }
  }
  throw LogicError("no parameter '{}'", name);
}

bool has_param(const ModelFacts& facts, const std::string& name) {
  try {
    find_param(facts, name);
    return true;
  } catch (const LogicError&) {
    return false;
  }
}

using Shape = std::vector<int64_t>;

/// Models of a family with every combination of a few depths, widths and vocabularies.
template <typename Law>
void for_models(ModelFamily family, Law law) {
  for (const int64_t layers : {1, 3}) {
    for (const int64_t width : {32, 96}) {
      for (const int64_t kv_heads : {1, 2, 4}) {
        for (const int64_t d_ff : {0, 80}) {
          for (const bool tied : {false, true}) {
            ModelConfig model{.family = family, .n_layers = layers, .d_model = width, .n_heads = 4};
            model.n_kv_heads = family == ModelFamily::kLlama ? kv_heads : 0;
            model.d_ff = d_ff;
            model.vocab_size = 300;
            model.tie_embeddings = tied;
            law(complete(model, 64));
          }
        }
      }
    }
  }
}

TEST(ModelFacts, Gpt2CountsFollowTheClosedFormula) {
  for_models(ModelFamily::kGpt2, [](const ModelConfig& m) {
    const int64_t d = m.d_model, f = m.d_ff, heads = m.tie_embeddings ? 1 : 2;
    const int64_t matrices = 4 * d * d + 2 * d * f;
    const int64_t biases_and_norms = 3 * d + d + f + d + 4 * d;
    const ModelFacts facts = describe(m, 64);
    EXPECT_EQ(facts.params,
              heads * m.vocab_size * d + 64 * d + m.n_layers * (matrices + biases_and_norms) + 2 * d);
    EXPECT_EQ(facts.matmul_params, m.n_layers * matrices + m.vocab_size * d);
  });
}

TEST(ModelFacts, LlamaCountsFollowTheClosedFormula) {
  for_models(ModelFamily::kLlama, [](const ModelConfig& m) {
    const int64_t d = m.d_model, f = m.d_ff, kv = d / m.n_heads * m.n_kv_heads,
                  heads = m.tie_embeddings ? 1 : 2;
    const int64_t matrices = 2 * d * d + 2 * d * kv + 3 * d * f;
    const ModelFacts facts = describe(m, 64);
    EXPECT_EQ(facts.params, heads * m.vocab_size * d + m.n_layers * (matrices + 2 * d) + d);
    EXPECT_EQ(facts.matmul_params, m.n_layers * matrices + m.vocab_size * d);
  });
}

/// Heads may be wider or narrower than their share of the residual stream.
TEST(ModelFacts, HeadsOfAnyWidthFollowTheClosedFormula) {
  for (const int64_t head : {2, 6, 8, 40}) {
    const ModelConfig m = complete({.family = ModelFamily::kLlama,
                                    .n_layers = 3,
                                    .d_model = 32,
                                    .n_heads = 4,
                                    .n_kv_heads = 2,
                                    .head_dim = head,
                                    .d_ff = 80,
                                    .vocab_size = 300},
                                   64);
    const int64_t d = 32, f = 80, q = 4 * head, kv = 2 * head, tokens = 300;
    const ModelFacts facts = describe(m, 64);
    EXPECT_EQ(facts.params, tokens * d + 3 * (2 * d * q + 2 * d * kv + 3 * d * f + 2 * d) + d);
    EXPECT_EQ(facts.matmul_params, 3 * (2 * d * q + 2 * d * kv + 3 * d * f) + tokens * d);
    EXPECT_DOUBLE_EQ(facts.flops_per_token, 6.0 * static_cast<double>(facts.matmul_params) +
                                                6.0 * 64.0 * static_cast<double>(3 * q));
    // Both norms' inputs and outputs, q k v and attention's output, gate, up and their product; a sum a head.
    EXPECT_DOUBLE_EQ(facts.saved_bytes_per_token,
                     static_cast<double>(3 * (4 * (4 * d + 2 * q + 2 * kv + 3 * f) + 4 * 4)));
  }
}

TEST(ModelFacts, MlpCountsFollowTheClosedFormula) {
  for_models(ModelFamily::kMlp, [](const ModelConfig& m) {
    const int64_t d = m.d_model, f = m.d_ff, heads = m.tie_embeddings ? 1 : 2;
    const ModelFacts facts = describe(m, 64);
    EXPECT_EQ(facts.params, heads * m.vocab_size * d + m.n_layers * (2 * d * f + d) + d);
    EXPECT_EQ(facts.matmul_params, m.n_layers * 2 * d * f + m.vocab_size * d);
  });
}

TEST(ModelFacts, ParamsAreTheSumOfUnitsWithUniqueNames) {
  for (const ModelFamily family : language_families()) {
    for_models(family, [](const ModelConfig& m) {
      const ModelFacts facts = describe(m, 64);
      std::set<std::string> names;
      int64_t total = 0, count = 0;
      for (const UnitSpec& unit : facts.units) {
        total += unit.numel();
        for (const ParamSpec& param : unit.params) names.insert(param.name);
        count += static_cast<int64_t>(unit.params.size());
      }
      EXPECT_EQ(total, facts.params);
      EXPECT_EQ(static_cast<int64_t>(names.size()), count);
    });
  }
}

TEST(ModelFacts, UnitsAreRootThenBlocksWhoseParametersCarryTheirPath) {
  const std::pair<ModelFamily, const char*> paths[] = {{ModelFamily::kGpt2, "transformer.h."},
                                                       {ModelFamily::kLlama, "model.layers."},
                                                       {ModelFamily::kMlp, "blocks."}};
  for (const auto& [family, path] : paths) {
    const ModelFacts facts = describe({.family = family, .n_layers = 3}, 64);
    ASSERT_EQ(facts.units.size(), 4u);
    EXPECT_EQ(facts.units[0].name, "root");
    for (size_t layer = 0; layer < 3; ++layer) {
      const UnitSpec& block = facts.units[layer + 1];
      EXPECT_EQ(block.name, path + std::to_string(layer));
      for (const ParamSpec& param : block.params)
        EXPECT_TRUE(param.name.starts_with(block.name + ".")) << param.name;
    }
  }
}

TEST(ModelFacts, Gpt2HasHuggingFaceNamesAndConv1dShapes) {
  const ModelFacts facts = describe(find_preset("gpt2-124m").model, 1024);
  EXPECT_EQ(find_param(facts, "transformer.wte.weight").shape, (Shape{50257, 768}));
  EXPECT_EQ(find_param(facts, "transformer.wpe.weight").shape, (Shape{1024, 768}));
  EXPECT_EQ(find_param(facts, "transformer.h.11.ln_1.bias").shape, (Shape{768}));
  EXPECT_EQ(find_param(facts, "transformer.h.11.attn.c_attn.weight").shape, (Shape{768, 2304}));
  EXPECT_EQ(find_param(facts, "transformer.h.11.attn.c_attn.bias").shape, (Shape{2304}));
  EXPECT_EQ(find_param(facts, "transformer.h.0.attn.c_proj.weight").shape, (Shape{768, 768}));
  EXPECT_EQ(find_param(facts, "transformer.h.0.mlp.c_fc.weight").shape, (Shape{768, 3072}));
  EXPECT_EQ(find_param(facts, "transformer.h.0.mlp.c_proj.weight").shape, (Shape{3072, 768}));
  EXPECT_EQ(find_param(facts, "transformer.h.0.mlp.c_proj.bias").shape, (Shape{768}));
  EXPECT_EQ(find_param(facts, "transformer.ln_f.weight").shape, (Shape{768}));
  EXPECT_FALSE(has_param(facts, "lm_head.weight"));  // tied
  size_t tensors = 0;
  for (const UnitSpec& unit : facts.units) tensors += unit.params.size();
  EXPECT_EQ(tensors, 148u);  // as in the published checkpoint without its mask buffers
}

TEST(ModelFacts, LlamaHasHuggingFaceNamesAndShapes) {
  const ModelFacts facts = describe(find_preset("llama-8b").model, 8192);
  EXPECT_EQ(find_param(facts, "model.embed_tokens.weight").shape, (Shape{128256, 4096}));
  EXPECT_EQ(find_param(facts, "model.layers.31.self_attn.q_proj.weight").shape, (Shape{4096, 4096}));
  EXPECT_EQ(find_param(facts, "model.layers.31.self_attn.k_proj.weight").shape, (Shape{1024, 4096}));
  EXPECT_EQ(find_param(facts, "model.layers.31.self_attn.v_proj.weight").shape, (Shape{1024, 4096}));
  EXPECT_EQ(find_param(facts, "model.layers.0.self_attn.o_proj.weight").shape, (Shape{4096, 4096}));
  EXPECT_EQ(find_param(facts, "model.layers.0.mlp.gate_proj.weight").shape, (Shape{14336, 4096}));
  EXPECT_EQ(find_param(facts, "model.layers.0.mlp.down_proj.weight").shape, (Shape{4096, 14336}));
  EXPECT_EQ(find_param(facts, "model.layers.0.post_attention_layernorm.weight").shape, (Shape{4096}));
  EXPECT_EQ(find_param(facts, "model.norm.weight").shape, (Shape{4096}));
  EXPECT_EQ(find_param(facts, "lm_head.weight").shape, (Shape{128256, 4096}));
  size_t tensors = 0;
  for (const UnitSpec& unit : facts.units) tensors += unit.params.size();
  EXPECT_EQ(tensors, 291u);  // as in the published index file
}

TEST(ModelFacts, ProjectionsThatFormOneMatrixAreNeighbours) {
  const ModelFacts facts = describe(find_preset("llama-tiny").model, 128);
  const std::vector<ParamSpec>& params = facts.units[1].params;
  const auto position = [&](const std::string& suffix) {
    for (size_t i = 0; i < params.size(); ++i) {
      if (params[i].name.ends_with(suffix)) return i;
    }
    return params.size();
  };
  EXPECT_EQ(position("k_proj.weight"), position("q_proj.weight") + 1);
  EXPECT_EQ(position("v_proj.weight"), position("k_proj.weight") + 1);
  EXPECT_EQ(position("up_proj.weight"), position("gate_proj.weight") + 1);
}

TEST(ModelFacts, FlopsAreSixPerMatmulWeightPlusCausalAttention) {
  for (const ModelFamily family : language_families()) {
    for_models(family, [](const ModelConfig& m) {
      for (const int64_t seq_len : {1, 64}) {
        const ModelFacts facts = describe(m, seq_len);
        const int64_t attention =
            m.family == ModelFamily::kMlp ? 0 : seq_len * m.n_heads * (m.d_model / m.n_heads) * m.n_layers;
        EXPECT_DOUBLE_EQ(facts.flops_per_token, static_cast<double>(6 * (facts.matmul_params + attention)));
      }
    });
  }
}

TEST(ModelFacts, TyingChangesParametersAndNotWork) {
  ModelConfig model = find_preset("llama-tiny").model;
  const ModelFacts tied = describe(model, 128);
  model.tie_embeddings = false;
  const ModelFacts untied = describe(model, 128);
  EXPECT_EQ(untied.params - tied.params, model.vocab_size * model.d_model);
  EXPECT_EQ(untied.matmul_params, tied.matmul_params);
}

TEST(ModelFacts, SavedBytesOfLlamaFollowTheBlockFormulaAtTwoBytes) {
  // h (12 + 4k) + 6f + 4a bytes a token and layer in bf16: SwiGLU is one kernel, which keeps gate and up
  const ModelConfig& m = find_preset("llama-8b").model;
  const double h = 4096, k = 8.0 / 32.0, f = 14336, a = 32;
  const PrecisionConfig bf16{.compute = Dtype::kBf16};
  EXPECT_DOUBLE_EQ(describe(m, 8192, bf16).saved_bytes_per_token, 32 * (h * (12 + 4 * k) + 6 * f + 4 * a));
  // In every second of 32 blocks the outputs of two norms and of SwiGLU are left out, or all but the input.
  const MemoryConfig cheap{.recompute = Recompute::kCheap, .recompute_every = 2};
  EXPECT_DOUBLE_EQ(describe(m, 8192, bf16, cheap).saved_bytes_per_token,
                   32 * (h * (12 + 4 * k) + 6 * f + 4 * a) - 16 * (4 * h + 2 * f));
  // Of 32 blocks every third is block 0, 3, ... 30: eleven.
  const MemoryConfig third{.recompute = Recompute::kCheap, .recompute_every = 3};
  EXPECT_DOUBLE_EQ(describe(m, 8192, bf16, third).saved_bytes_per_token,
                   32 * (h * (12 + 4 * k) + 6 * f + 4 * a) - 11 * (4 * h + 2 * f));
  const MemoryConfig block{.recompute = Recompute::kBlock};
  EXPECT_DOUBLE_EQ(describe(m, 8192, bf16, block).saved_bytes_per_token, 32 * 2 * h);
  const MemoryConfig but_attention{.recompute = Recompute::kAllButAttention};
  EXPECT_DOUBLE_EQ(describe(m, 8192, bf16, but_attention).saved_bytes_per_token, 32 * (4 * h + 4 * a));
}

TEST(ModelFacts, SavedBytesDoubleWithTheElementExceptTheLogSumExp) {
  for (const Preset& preset : presets()) {
    const ModelConfig& m = preset.model;
    if (reads_images(m.family)) continue;
    const double bf16 = describe(m, 128, {.compute = Dtype::kBf16}).saved_bytes_per_token;
    const double fp32 = describe(m, 128, {.compute = Dtype::kFp32}).saved_bytes_per_token;
    const double log_sum_exp =
        m.family == ModelFamily::kMlp ? 0.0 : 4.0 * static_cast<double>(m.n_heads * m.n_layers);
    EXPECT_DOUBLE_EQ(fp32 - log_sum_exp, 2 * (bf16 - log_sum_exp)) << preset.name;
  }
}

TEST(ModelFacts, SavedBytesOfGpt2AreThePartsByHand) {
  // d = 768, F = 3072, 12 heads, 12 layers, 4 bytes: 8 rows of d and 2 of F, and 12 floats
  const double expected = 12 * (4 * (8 * 768 + 2 * 3072) + 4 * 12);
  EXPECT_DOUBLE_EQ(describe(find_preset("gpt2-124m").model, 1024).saved_bytes_per_token, expected);
}

/// Probabilities of all tokens for each head in fp32, once more in bf16 for the product with the values, and
/// keys and values of each query head in place of those of a group; no log-sum-exp.
TEST(ModelFacts, EagerAttentionKeepsItsScores) {
  ModelConfig model = complete(find_preset("llama-1b").model, 2048);
  const double fused = describe(model, 2048, {.compute = Dtype::kBf16}).saved_bytes_per_token;
  model.attention = AttentionKind::kEager;
  const double eager = describe(model, 2048, {.compute = Dtype::kBf16}).saved_bytes_per_token;
  EXPECT_DOUBLE_EQ(eager - fused, 16 * (32 * (2048 * 6 - 4) + 2 * 2 * (2048 - 512)));
  EXPECT_EQ(score_gradient_bytes(model, 2048), 8 * 32 * 2048);
  model.attention = AttentionKind::kAuto;
  EXPECT_EQ(score_gradient_bytes(model, 2048), 0);
}

TEST(Complete, FillsZerosAndKeepsTheRest) {
  const ModelConfig filled = complete({.d_model = 64, .n_heads = 8}, 256);
  EXPECT_EQ(filled.n_kv_heads, 8);
  EXPECT_EQ(filled.d_ff, 256);
  EXPECT_EQ(filled.max_seq_len, 256);
  const ModelConfig kept = complete({.n_kv_heads = 2, .d_ff = 100, .max_seq_len = 512}, 256);
  EXPECT_EQ(kept.n_kv_heads, 2);
  EXPECT_EQ(kept.d_ff, 100);
  EXPECT_EQ(kept.max_seq_len, 512);
}

TEST(ModelFacts, LargestAllowedSizesStayInside64Bits) {
  // Blocks dominate: L (4 d^2 + 3 d f) = 1e4 (4e12 + 3e13) = 3.4e17, below 9.2e18.
  const ModelConfig model{.family = ModelFamily::kLlama,
                          .n_layers = 10'000,
                          .d_model = 1'000'000,
                          .n_heads = 1000,
                          .d_ff = 10'000'000,
                          .vocab_size = 100'000'000};
  const int64_t blocks = 10'000 * (int64_t{34} * 1'000'000'000'000);
  EXPECT_EQ(describe(model, 128).matmul_params, blocks + int64_t{100'000'000} * 1'000'000);
}

TEST(ModelFamily, EveryFamilyHasItsOwnRecordAndAPreset) {
  for (const ModelFamily family : language_families()) {
    EXPECT_EQ(record_of(family).family, family);
    EXPECT_TRUE(std::ranges::any_of(presets(), [&](const Preset& preset) {
      return preset.model.family == family;
    })) << name(family);
  }
  EXPECT_THROW(record_of(static_cast<ModelFamily>(99)), LogicError);
}

TEST(ModelFamily, WeightDecayIsForMatrices) {
  for (const ModelFamily family : language_families()) {
    for (const UnitSpec& unit : describe({.family = family}, 64).units) {
      for (const ParamSpec& param : unit.params)
        EXPECT_EQ(param.decays, param.shape.size() == 2) << param.name;
    }
  }
}

}  // namespace
}  // namespace trireme::plan
