#include "trireme/plan/hugging_face.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/presets.h"

namespace trireme::plan {
namespace {

using Json = nlohmann::json;

/// As Llama 3.1 8B's own, but for ids of tokens.
Json llama() {
  return Json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false,
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0",
    "use_cache": true, "vocab_size": 128256})");
}

/// As the first GPT-2's own.
Json gpt2() {
  return Json::parse(R"({
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
    "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true,
    "max_length": 50}}, "vocab_size": 50257})");
}

std::string refusal_of(const Json& config, const std::set<std::string>& without = {}) {
  try {
    from_hugging_face(config, "config.json", without);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return {};
}

int64_t params_of(const ModelConfig& model) {
  return describe(model, 1024).params;
}

/// Published numbers of parameters.
TEST(HuggingFaceConfig, PublishedModelsHaveTheirParameters) {
  const ModelConfig model = from_hugging_face(llama(), "config.json");
  EXPECT_EQ(params_of(model), 8'030'261'248);
  EXPECT_EQ(model.rope_scaling, RopeScaling::kLlama3);
  EXPECT_EQ(model.rope_factor, 8.0);
  EXPECT_EQ(model.rope_original_len, 8192);
  EXPECT_EQ(model.max_seq_len, 131072);
  const ModelConfig small = from_hugging_face(gpt2(), "config.json");
  EXPECT_EQ(params_of(small), 124'439'808);
  EXPECT_EQ(small.dropout, 0.1);
  EXPECT_TRUE(small.tie_embeddings);
}

/// Version 5 writes the base of the frequencies beside their scaling.
TEST(HuggingFaceConfig, BothWaysOfWritingFrequenciesAreRead) {
  Json config = llama();
  config["rope_parameters"] = config["rope_scaling"];
  config["rope_parameters"]["rope_theta"] = config["rope_theta"];
  config.erase("rope_scaling");
  config.erase("rope_theta");
  const ModelConfig model = from_hugging_face(config, "config.json");
  EXPECT_EQ(model.rope_theta, 500000.0);
  EXPECT_EQ(model.rope_scaling, RopeScaling::kLlama3);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e4}};
  EXPECT_EQ(from_hugging_face(config, "config.json").rope_scaling, RopeScaling::kNone);
  Json old = llama();
  old["rope_scaling"]["type"] = "llama3";
  old["rope_scaling"].erase("rope_type");
  EXPECT_EQ(from_hugging_face(old, "config.json").rope_factor, 8.0);
}

/// Where both are there, transformers takes all of "rope_scaling" unless it is empty, and the base from
/// beside it.
TEST(HuggingFaceConfig, FrequenciesThatDisagreeAreThoseOfRopeScaling) {
  Json config = llama();
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e4}};
  ModelConfig model = from_hugging_face(config, "config.json");
  EXPECT_EQ(model.rope_scaling, RopeScaling::kLlama3);
  EXPECT_EQ(model.rope_theta, 500000.0);
  config["rope_scaling"] = Json::object();
  model = from_hugging_face(config, "config.json");
  EXPECT_EQ(model.rope_scaling, RopeScaling::kNone);
  EXPECT_EQ(model.rope_theta, 1e4);
}

TEST(HuggingFaceConfig, WhatIsWrittenIsReadBack) {
  for (const Json& config : {llama(), gpt2()}) {
    const ModelConfig model = from_hugging_face(config, "config.json");
    const Json written = to_hugging_face(model, "float32");
    Config a, b;
    a.model = model;
    b.model = from_hugging_face(written, "config.json");
    EXPECT_EQ(differing_keys(a, b), std::vector<std::string>{});
    EXPECT_EQ(written["torch_dtype"], "float32");
  }
}

TEST(HuggingFaceConfig, EveryPresetOfAFamilyThatTransformersHasCanBeWritten) {
  for (const Preset& preset : presets()) {
    const ModelConfig model = complete(preset.model, 64);
    if (model.family == ModelFamily::kMlp || reads_images(model.family)) {
      EXPECT_THROW(to_hugging_face(model, "float32"), ConfigError);
    } else {
      EXPECT_EQ(params_of(from_hugging_face(to_hugging_face(model, "float32"), preset.name)),
                params_of(model));
    }
  }
}

struct Change {
  const char *key, *value, *said;
};

TEST(HuggingFaceConfig, WhatTheModelCannotBeIsRefusedByName) {
  for (const auto& [key, value, said] : std::vector<Change>{
           {"hidden_act", "\"gelu\"", "hidden_act=\"gelu\""},
           {"attention_bias", "true", "attention_bias=true"},
           {"mlp_bias", "true", "mlp_bias=true"},
           {"head_dim", "\"wide\"", "head_dim=\"wide\""},
           {"head_dim", "63", "model.head_dim=63"},
           {"attention_dropout", "0.1", "attention_dropout=0.1"},
           {"rope_scaling", R"({"rope_type":"yarn","factor":2.0})", "rope_scaling.rope_type=\"yarn\""},
           {"rope_scaling", R"({"rope_type":"llama3","factor":2.0})",
            "rope_scaling.low_freq_factor is missing"},
           {"quantization_config", R"({"bits":4})", "quantization_config="},
           {"sliding_window", "4096", "sliding_window=4096 is not supported"},
           {"architectures", R"(["LlamaForSequenceClassification"])", "architectures="},
           {"model_type", "\"mistral\"", "model_type=\"mistral\""},
           {"num_hidden_layers", "-1", "num_hidden_layers=-1"},
           {"num_hidden_layers", "1.5", "num_hidden_layers=1.5"},
           {"num_hidden_layers", "null", "num_hidden_layers is missing"},
           {"hidden_size", "9223372036854775807", "hidden_size=9223372036854775807"},
           {"hidden_size", "2000000000", "model.d_model"},
           {"num_key_value_heads", "7", "model.n_kv_heads"},
           {"vocab_size", "\"many\"", "vocab_size=\"many\""},
           {"rms_norm_eps", "[]", "rms_norm_eps=[]"}}) {
    Json config = llama();
    config[key] = Json::parse(value);
    EXPECT_NE(refusal_of(config).find(said), std::string::npos) << said << " in: " << refusal_of(config);
  }
  for (const auto& [key, value, said] : std::vector<Change>{
           {"activation_function", "\"relu\"", "activation_function=\"relu\""},
           {"scale_attn_by_inverse_layer_idx", "true", "scale_attn_by_inverse_layer_idx=true"},
           {"scale_attn_weights", "false", "scale_attn_weights=false"},
           {"add_cross_attention", "true", "add_cross_attention=true"},
           {"embd_pdrop", "0.2", "embd_pdrop=0.2"},
           {"pruned_heads", R"({"0":[1]})", "pruned_heads="}}) {
    Json config = gpt2();
    config[key] = Json::parse(value);
    EXPECT_NE(refusal_of(config).find(said), std::string::npos) << said << " in: " << refusal_of(config);
  }
  EXPECT_NE(refusal_of(Json::array()), "");
  EXPECT_NE(refusal_of(Json::object()), "");
}

TEST(HuggingFaceConfig, AllThatIsWrongIsSaidAtOnceAndKeysCanBeLeftOut) {
  Json config = llama();
  config["sliding_window"] = 4096;
  config["attention_dropout"] = 0.1;
  const std::string both = refusal_of(config);
  EXPECT_NE(both.find("sliding_window"), std::string::npos);
  EXPECT_NE(both.find("attention_dropout"), std::string::npos);
  EXPECT_EQ(refusal_of(config, {"sliding_window", "attention_dropout"}), "");
}

TEST(HuggingFaceNames, AreThoseOfTheParameters) {
  const HuggingFaceNames plain(gpt2(), {"transformer.wte.weight", "lm_head.weight"});
  EXPECT_EQ(plain("transformer.h.0.ln_1.weight"), "transformer.h.0.ln_1.weight");
  EXPECT_EQ(plain("lm_head.weight"), std::nullopt);
  EXPECT_EQ(plain("transformer.h.0.attn.bias"), std::nullopt);
  EXPECT_EQ(plain("transformer.h.0.attn.c_attn.bias"), "transformer.h.0.attn.c_attn.bias");
  EXPECT_EQ(plain.tied_to(), "transformer.wte.weight");
  const HuggingFaceNames headless(gpt2(), {"wte.weight", "h.0.attn.bias"});
  EXPECT_EQ(headless("wte.weight"), "transformer.wte.weight");
  EXPECT_EQ(headless("h.0.attn.masked_bias"), std::nullopt);
  const HuggingFaceNames untied(llama(), {"model.embed_tokens.weight"});
  EXPECT_EQ(untied("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(untied("model.layers.0.self_attn.rotary_emb.inv_freq"), std::nullopt);
}

}  // namespace
}  // namespace trireme::plan
