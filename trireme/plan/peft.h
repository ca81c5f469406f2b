#pragma once
// Adapters as PEFT's files have them: adapter_config.json, and the names in adapter_model.safetensors.
#include <nlohmann/json.hpp>
#include <string>

#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {

inline constexpr const char* kPeftConfig = "adapter_config.json";
inline constexpr const char* kPeftWeights = "adapter_model.safetensors";
/// The names of PEFT's own modules, which stand before those of parameters.
inline constexpr const char* kPeftPrefix = "base_model.model.";

/// The content of adapter_config.json for the adapters of `model`.
nlohmann::ordered_json to_peft(const ModelConfig& model);

/// The adapters of `model` alone, by the names of files of PEFT, as facts of a model.
ModelFacts peft_facts(const ModelConfig& model, int64_t seq_len);

/// Throws ConfigError naming `path` and the key where `config`, the content of an adapter_config.json, has
/// another rank or alpha than `model`, or kind, or asks for what adapters here do not have (biases,
/// other scales).
void check_peft(const nlohmann::json& config, const ModelConfig& model, const std::string& path);

}  // namespace trireme::plan
