#pragma once
// config.yaml of a run line by line, of whatever version: what plan::to_yaml() writes, with or without
// origins.
#include <string>
#include <vector>

namespace trireme::report {

/// A value as it is written there.
struct ConfigEntry {
  std::string key;  ///< "train.steps"
  std::string value;
  std::string origin;  ///< the comment behind it: where it came from; empty: not said
};

/// Whether its origin says that somebody has set it: it is no default, and not derived from other values.
bool was_given(const ConfigEntry& entry);

std::vector<ConfigEntry> read_config_entries(const std::string& yaml);

/// The text of a config.yaml with these entries, origins in a column.
std::string config_text(const std::vector<ConfigEntry>& entries);

/// `yaml` with the origins of `before` for all values that are the same in both.
std::string with_origins_of(const std::string& before, const std::string& yaml);

/// Whether keys and values are the same, wherever they came from.
bool same_values(const std::string& a, const std::string& b);

}  // namespace trireme::report
