#pragma once
// Adapters as PEFT's files have them: adapter_config.json, and the names in adapter_model.safetensors.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {

inline constexpr const char* kPeftConfig = "adapter_config.json";
inline constexpr const char* kPeftWeights = "adapter_model.safetensors";
/// The names of PEFT's own modules, which stand before those of parameters.
inline constexpr const char* kPeftPrefix = "base_model.model.";

/// The content of adapter_config.json for the adapters of `model`.
nlohmann::ordered_json to_peft(const ModelConfig& model);

/// The adapters of `model` alone as facts of a model, with a prefix before their names.
ModelFacts adapter_facts(const ModelConfig& model, int64_t seq_len, const std::string& prefix = kPeftPrefix);

/// The keys of a config with the adapters that an adapter_config.json describes, "adapter.rank=8", which
/// check_peft() then passes. Throws ConfigError naming `path` where it has no rank, alpha or names of layers.
std::vector<std::string> keys_of_peft(const nlohmann::json& config, const std::string& path);

/// Throws ConfigError naming `path` and the key where `config`, the content of an adapter_config.json, has
/// another rank or alpha than `model`, or kind, or asks for what adapters here do not have (biases,
/// other scales).
void check_peft(const nlohmann::json& config, const ModelConfig& model, const std::string& path);

}  // namespace trireme::plan
