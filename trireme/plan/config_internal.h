#pragma once
// Shared by the sources of the configuration: values as text on their way into fields. Private to
// plan/config*.cpp and plan/deepspeed.cpp.
#include <fmt/format.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/config.h"

namespace trireme::plan {

/// One value that the user gave, still as text.
struct Assignment {
  std::string key;     ///< "train.steps"
  std::string text;    ///< "100"
  std::string origin;  ///< "configs/quickstart.yaml:5:3", "--train.steps", "TRIREME__TRAIN__STEPS"
};

/// The scalars of a YAML text in their order; `name` stands for it in messages. Throws ConfigError with line
/// and column for malformed text, unknown keys, keys given twice and values that are no scalars.
std::vector<Assignment> read_yaml(const std::string& text, const std::string& name);

/// Stores `text` in `field`. Throws ConfigError naming key, value, origin and what is allowed.
void assign(const Field& field, std::string_view text, std::string_view origin);

/// The value as YAML: shortest text that reads back to the same value; strings are quoted where they must be.
std::string format_value(const Field& field);

/// "at least 1", "0 to 1", "adamw, sgd" or empty.
std::string allowed_values(const Field& field);

/// ", did you mean 'train.steps'?" when a key of the table is near `key` or has the same last part, else
/// empty.
std::string suggest_key(std::string_view key);

/// "model.d_model=100 (--model.d_model)".
template <typename Value>
std::string said(const Origins& origins, const std::string& key, const Value& value) {
  return fmt::format("{}={} ({})", key, value, origins.at(key));
}

/// Rules between fields; `config` is complete; `tokenizes` as in ConfigSources. Throws ConfigError naming the
/// keys, their values and origins.
void check_config(const Config& config, const Origins& origins, bool tokenizes = true);
/// The checks of runs in stages.
void check_pipeline(const Config& config, const Origins& origins);
/// The key and value by which ranks have two copies of each stage, one a direction; none: they have not.
std::optional<std::string> said_two_ways(const Config& config, const Origins& origins);

}  // namespace trireme::plan
