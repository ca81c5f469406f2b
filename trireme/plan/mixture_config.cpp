// data.mixture: sources of text by name, each with a path and a weight.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/text_file.h"
#include "trireme/plan/yaml_text.h"

namespace trireme::plan {
namespace {

constexpr const char* kMixtureForm = "write {NAME: {path: TEXT, weight: NUMBER}, ...}";

void check_source_name(const std::string& name) {
  const auto fits = [](unsigned char letter) {
    return std::isalnum(letter) != 0 || letter == '_' || letter == '-';
  };
  if (!name.empty() && std::ranges::all_of(name, fits)) return;
  throw ConfigError("[plan.config] data.mixture: the name '{}' of a source; use letters, digits, _ and -",
                    name);
}

double weight_of(const std::string& name, const std::string& text) {
  const auto weight = parse_whole_text<double>(text);
  if (weight && std::isfinite(*weight) && *weight > 0.0) return *weight;
  throw ConfigError("[plan.config] data.mixture: {} has weight {}; give it a number above 0, or leave {} out",
                    name, text, name);
}

MixtureSource source_of(const std::string& name, const YAML::Node& entry) {
  check_source_name(name);
  MixtureSource source{.name = name};
  if (entry.IsScalar()) source.path = entry.Scalar();  // the weight is 1
  if (!entry.IsScalar() && !entry.IsMap())
    throw ConfigError("[plan.config] data.mixture: {} has no path; {}", name, kMixtureForm);
  for (const auto& part : entry.IsMap() ? entry : YAML::Node(YAML::NodeType::Map)) {
    const std::string key = part.first.IsScalar() ? part.first.Scalar() : "?";
    const bool known = (key == "path" || key == "weight") && part.second.IsScalar();
    if (!known) {
      throw ConfigError(
          "[plan.config] data.mixture: {} has '{}'; a source has a path and a weight, each a single value",
          name, key);
    }
    if (key == "path") source.path = part.second.Scalar();
    if (key == "weight") source.weight = weight_of(name, part.second.Scalar());
  }
  if (source.path.empty())
    throw ConfigError("[plan.config] data.mixture: {} has no path; {}", name, kMixtureForm);
  if (is_utf8(source.path)) return source;  // as JSON has it, which to_text() writes
  throw ConfigError("[plan.config] data.mixture: the path of {} is not UTF-8; rename the file", name);
}

}  // namespace

std::string to_text(const Mixture& mixture) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const MixtureSource& source : mixture.sources)
    json[source.name] = {{"path", source.path}, {"weight", source.weight}};
  return mixture.sources.empty() ? "" : json.dump();
}

std::optional<Mixture> parse_mixture(std::string_view text) {
  const YAML::Node root = parse_yaml(std::string(text), "data.mixture", "plan.config");
  Mixture mixture;
  if (root.IsNull()) return mixture;
  if (!root.IsMap()) return std::nullopt;
  for (const auto& entry : root) {
    if (!entry.first.IsScalar()) return std::nullopt;
    mixture.sources.push_back(source_of(entry.first.Scalar(), entry.second));
  }
  std::ranges::sort(mixture.sources, {}, &MixtureSource::name);
  const auto twice = std::ranges::adjacent_find(mixture.sources, {}, &MixtureSource::name);
  if (twice == mixture.sources.end()) return mixture;
  throw ConfigError("[plan.config] data.mixture: {} is given twice; give each source a name of its own",
                    twice->name);
}

}  // namespace trireme::plan
