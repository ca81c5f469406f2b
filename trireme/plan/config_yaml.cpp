// YAML to assignments.
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/config_aliases.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/yaml_text.h"

namespace trireme::plan {
namespace {

/// Ours, and those of others that stand for them.
std::set<std::string> all_keys() {
  Config unused;
  std::set<std::string> keys;
  for (const std::string& alias : alias_keys()) keys.insert(alias);
  for (const Field& field : fields(unused)) keys.insert(field.key);
  return keys;
}

/// Keys whose value may be a mapping, which is then passed on as text.
std::set<std::string> mapping_keys() {
  Config unused;
  std::set<std::string> keys;
  for (const Field& field : fields(unused)) {
    if (field.is_mapping) keys.insert(field.key);
  }
  return keys;
}

std::string in_one_line(const YAML::Node& value) {
  YAML::Emitter out;
  out.SetMapFormat(YAML::Flow);
  out.SetSeqFormat(YAML::Flow);
  out << value;
  return out.c_str();
}

/// Collects the scalars of one document.
class YamlReader {
 public:
  explicit YamlReader(const std::string& name) : name_(name), keys_(all_keys()) {}

  std::vector<Assignment> read(const YAML::Node& root) {
    read_map(root, "");
    return std::move(assignments_);
  }

 private:
  /// `prefix` is "" for the document and "train." for a section.
  void read_map(const YAML::Node& map, const std::string& prefix) {
    std::set<std::string> seen;
    for (const auto& entry : map) {
      const std::string at = place_of(name_, entry.first.Mark());
      if (!entry.first.IsScalar()) throw ConfigError("[plan.config] {}: a key must be a plain word", at);
      const std::string word = entry.first.Scalar();
      if (word == "<<") {
        throw ConfigError(
            "[plan.config] {}: merge keys ('<<') are not supported; write the keys out in their sections",
            at);
      }
      if (!seen.insert(word).second) {
        throw ConfigError("[plan.config] {}: '{}' is given twice; remove one", at, prefix + word);
      }
      if (word.find('.') != std::string::npos) throw_dotted(prefix + word, at);
      read_entry(prefix + word, entry.second, at);
    }
  }

  void read_entry(const std::string& key, const YAML::Node& value, const std::string& at) {
    if (is_section(key)) {
      read_section(key, value, at);
    } else if (!keys_.contains(key)) {
      throw_unknown(key, at);
    } else if (value.IsMap() && mappings_.contains(key)) {
      assignments_.push_back({key, in_one_line(value), at});
    } else if (value.IsScalar()) {
      assignments_.push_back({key, value.Scalar(), at});
    } else {
      throw ConfigError("[plan.config] {}: '{}' has {}; give it a single value", at, key,
                        value.IsNull()  ? "no value"
                        : value.IsMap() ? "keys below it"
                                        : "a list");
    }
  }

  void read_section(const std::string& key, const YAML::Node& value, const std::string& at) {
    if (value.IsNull()) return;  // all its keys are commented out
    if (!value.IsMap()) {
      throw ConfigError("[plan.config] {}: '{}' is a section; put its keys below it, indented", at, key);
    }
    read_map(value, key + ".");
  }

  bool is_section(const std::string& key) const {
    const auto first = keys_.lower_bound(key + ".");
    return first != keys_.end() && first->starts_with(key + ".");
  }

  /// Names that may stand beside `key`: sections and keys of the document, or the keys of its section.
  std::vector<std::string> siblings(const std::string& key) const {
    const std::string prefix = key.substr(0, key.find('.') == std::string::npos ? 0 : key.find('.') + 1);
    std::vector<std::string> names;
    for (const std::string& known : keys_) {
      if (known.starts_with(prefix)) names.push_back(split(known.substr(prefix.size()), '.').front());
    }
    return names;
  }

  [[noreturn]] void throw_unknown(const std::string& key, const std::string& at) const {
    const std::string word = key.substr(key.find('.') + 1);
    const std::string near = nearest_name(word, siblings(key));
    throw ConfigError("[plan.config] {}: unknown key '{}'{}; correct or remove it", at, key,
                      near.empty() ? suggest_key(key) : fmt::format(", did you mean '{}'?", near));
  }

  [[noreturn]] void throw_dotted(const std::string& key, const std::string& at) const {
    const size_t dot = key.find('.');
    throw ConfigError(
        "[plan.config] {}: unknown key '{}'{}; in YAML, keys of a section are nested: write '{}:' and below "
        "it, indented, '{}:'",
        at, key, keys_.contains(key) ? "" : suggest_key(key), key.substr(0, dot), key.substr(dot + 1));
  }

  std::string name_;
  std::set<std::string> keys_, mappings_ = mapping_keys();
  std::vector<Assignment> assignments_;
};

}  // namespace

std::vector<Assignment> read_yaml(const std::string& text, const std::string& name) {
  const YAML::Node root = parse_yaml(text, name, "plan.config");
  if (root.IsNull()) return {};
  if (!root.IsMap()) {
    throw ConfigError(
        "[plan.config] {}: a config is a mapping of keys to values; begin with a line such as 'name: run'",
        place_of(name, root.Mark()));
  }
  return YamlReader(name).read(root);
}

}  // namespace trireme::plan
