#include "trireme/plan/presets.h"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/vision_model.h"

namespace trireme::plan {
namespace {

/// Settings that the presets of one family share.
ModelConfig gpt2(int64_t layers, int64_t width, int64_t heads, int64_t vocab, int64_t positions) {
  return {.family = ModelFamily::kGpt2,
          .n_layers = layers,
          .d_model = width,
          .n_heads = heads,
          .n_kv_heads = heads,
          .d_ff = 4 * width,
          .vocab_size = vocab,
          .max_seq_len = positions};
}

ModelConfig llama(int64_t layers, int64_t width, int64_t heads, int64_t kv_heads, int64_t d_ff) {
  return {.family = ModelFamily::kLlama,
          .n_layers = layers,
          .d_model = width,
          .n_heads = heads,
          .n_kv_heads = kv_heads,
          .d_ff = d_ff,
          .vocab_size = 128256};
}

ModelConfig llama_tiny() {
  ModelConfig model = llama(4, 128, 4, 2, 352);
  model.vocab_size = 256;
  model.rope_theta = 10000.0;
  return model;
}

ModelConfig llama_8b() {
  ModelConfig model = llama(32, 4096, 32, 8, 14336);
  model.tie_embeddings = false;
  return model;
}

ModelConfig llama_70b() {
  ModelConfig model = llama(80, 8192, 64, 8, 28672);
  model.tie_embeddings = false;
  return model;
}

ModelConfig mlp() {
  return {
      .family = ModelFamily::kMlp, .n_layers = 4, .d_model = 128, .n_heads = 1, .n_kv_heads = 1, .d_ff = 512};
}

std::vector<Preset> make_presets() {
  std::vector<Preset> table = {
      {"gpt-tiny", "0.84M parameters, byte tokens: learns text on two CPU cores in a minute",
       gpt2(4, 128, 4, 256, 0)},
      {"gpt2-124m", "GPT-2 small, 124,439,808 parameters", gpt2(12, 768, 12, 50257, 1024)},
      {"gpt2-1.5b", "GPT-2 XL, 1,557,611,200 parameters", gpt2(48, 1600, 25, 50257, 1024)},
      {"mini-gpt-153m", "8 wide layers of 1024, 153,283,584 parameters", gpt2(8, 1024, 16, 50257, 1024)},
      {"mini-gpt-512m", "8 wide layers of 2048, 507,893,760 parameters", gpt2(8, 2048, 16, 50257, 1024)},
      {"llama-tiny", "0.77M parameters, byte tokens, grouped-query attention", llama_tiny()},
      {"llama-1b", "Llama 3.2 1B, 1,235,814,400 parameters", llama(16, 2048, 32, 8, 8192)},
      {"llama-8b", "Llama 3 8B, 8,030,261,248 parameters", llama_8b()},
      {"llama-70b", "Llama 3 70B, 70,553,706,496 parameters", llama_70b()},
      {"mlp", "residual feed-forward network on the previous byte, without attention, 0.56M parameters",
       mlp()},
  };
  for (const VisionPreset& preset : vision_presets()) {
    ModelConfig model{.family = preset.model.family};
    model.vision = preset.model;
    table.push_back({std::string(preset.name), std::string(preset.summary), complete_vision(model)});
  }
  for (Preset& preset : table) preset.model.preset = preset.name;
  return table;
}

const std::vector<Preset>& preset_table() {
  static const std::vector<Preset> instance = make_presets();
  return instance;
}

}  // namespace

std::span<const Preset> presets() {
  return preset_table();
}

const Preset& find_preset(std::string_view name) {
  std::vector<std::string> names;
  for (const Preset& preset : preset_table()) {
    if (preset.name == name) return preset;
    names.push_back(preset.name);
  }
  const std::string near = nearest_name(name, names);
  throw ConfigError("[plan.presets] model.preset '{}' is unknown{}; choose one of {}", name,
                    near.empty() ? "" : fmt::format(", did you mean '{}'?", near), join(names, ", "));
}

std::string preset_text(const ModelConfig& model, int64_t seq_len) {
  if (model.preset.empty()) return "custom";
  constexpr std::string_view kSection = "model.";
  // Keys of text that differ for a model of images follow from its own keys, so they are not listed.
  static const std::set<std::string> of_text = {"n_layers", "d_model",    "n_heads",     "n_kv_heads",
                                                "d_ff",     "vocab_size", "max_seq_len", "tie_embeddings"};
  const bool images = reads_images(model.family);
  Config given, unchanged;
  given.model = model;
  unchanged.model = complete(find_preset(model.preset).model, seq_len);
  std::vector<std::string> changed;
  for (const std::string& key : differing_keys(given, unchanged)) {
    const std::string name = key.starts_with(kSection) ? key.substr(kSection.size()) : key;
    if (name == "weights" || name == "adapter.weights" || (images && of_text.contains(name))) continue;
    changed.push_back(name);
  }
  if (changed.empty()) return model.preset;
  return fmt::format("{}, changed: {}", model.preset, join(changed, ", "));
}

}  // namespace trireme::plan
