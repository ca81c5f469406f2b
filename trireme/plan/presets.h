#pragma once
// Built-in models by name.
#include <span>
#include <string>
#include <string_view>

#include "trireme/plan/config.h"

namespace trireme::plan {

struct Preset {
  std::string name;
  std::string summary;  ///< one line
  ModelConfig model;
};

std::span<const Preset> presets();

/// Throws ConfigError with the nearest name when there is none of that name.
const Preset& find_preset(std::string_view name);

/// "resnet18-cifar", "resnet18-cifar, changed: depth, width" with the keys by which a complete model on
/// sequences of `seq_len` tokens differs from its preset, or "custom" where it names none.
std::string preset_text(const ModelConfig& model, int64_t seq_len);

}  // namespace trireme::plan
