#pragma once
// Texts in YAML, and places in them for messages. Private to the sources of plan/ that read such files: no
// other header includes yaml-cpp.
#include <yaml-cpp/yaml.h>

#include <string>
#include <string_view>

namespace trireme::plan {

/// "file.yaml:5:3", counted from 1; the name alone where there is no place.
std::string place_of(const std::string& name, const YAML::Mark& mark);

/// The one document of `text`; null when there is none. `name` stands for the text in messages, `where` is
/// the module that reads it, as in "[plan.config]". Throws ConfigError for more documents and what is no
/// YAML.
YAML::Node parse_yaml(const std::string& text, const std::string& name, std::string_view where);

}  // namespace trireme::plan
