#pragma once
// DeepSpeed's JSON config files as a source of our configuration. A table has a row for each of its keys:
// what the key becomes here, why it needs nothing, or why it is refused. No key is passed over in silence.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "trireme/plan/config.h"

namespace trireme::plan {

struct DeepSpeedFile {
  std::string path = "";  ///< stands for the file in messages and origins
  std::string text = "";  ///< JSON instead of what the file at `path` has
  /// The ranks of the run, by the config without this file; none: they are not known yet.
  std::function<std::optional<int64_t>(const Config& ours)> ranks = nullptr;
};

/// A value of ours that a key of the file gives.
struct DeepSpeedSetting {
  std::string key;    ///< "parallel.policy"
  std::string value;  ///< "zero2"
  std::string why;    ///< "zero2_config.json: zero_optimization.stage"
};

struct DeepSpeedConfig {
  std::vector<DeepSpeedSetting> settings = {};  ///< in the order of the file; a key of ours once
  std::vector<std::string> notes = {};          ///< on the keys that are no setting, and on differences
};

/// The settings of `file`, for a run whose other sources make `ours`. Its "auto" and null keep our values.
/// Throws ConfigError for text that is not JSON (with line and column; comments are no error), and for keys
/// and values that are refused: "[plan.deepspeed] FILE: key = value: what is wrong; the fix".
DeepSpeedConfig read_deepspeed(const DeepSpeedFile& file, const Config& ours);

/// load() with `file` between the YAML file and the environment. Its notes come with those of the others.
ResolvedConfig load(const ConfigSources& sources, const DeepSpeedFile& file, const Environment& environment);

/// YAML of the settings alone, each with its origin, and the notes above it as comments.
std::string to_yaml(const DeepSpeedConfig& config);

/// The table of keys for readers, in Markdown.
std::string describe_deepspeed_keys();

}  // namespace trireme::plan
