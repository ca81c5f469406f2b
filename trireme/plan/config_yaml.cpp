// YAML to assignments. The only source that includes yaml-cpp.
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/config_aliases.h"
#include "trireme/plan/config_internal.h"

namespace trireme::plan {
namespace {

/// "file.yaml:5:3", counted from 1.
std::string place(const std::string& name, const YAML::Mark& mark) {
  return mark.is_null() ? name : fmt::format("{}:{}:{}", name, mark.line + 1, mark.column + 1);
}

/// Ours, and those of others that stand for them.
std::set<std::string> all_keys() {
  Config unused;
  std::set<std::string> keys;
  for (const std::string& alias : alias_keys()) keys.insert(alias);
  for (const Field& field : fields(unused)) keys.insert(field.key);
  return keys;
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
      const std::string at = place(name_, entry.first.Mark());
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
  std::set<std::string> keys_;
  std::vector<Assignment> assignments_;
};

/// Takes no notice of what a document holds.
class Ignore final : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
  }
  void OnMapEnd() override {}
};

/// Counts the documents of `text` up to two: yaml-cpp finds documents without end in texts such as ",", of
/// which it takes nothing. Throws YAML::Exception for text that is not YAML.
int count_documents(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  Ignore events;
  int count = 0;
  while (count < 2 && parser.HandleNextDocument(events)) ++count;
  return count;
}

/// The first line that a tab indents, from 1; none: 0.
size_t line_with_tab(const std::string& text) {
  const std::vector<std::string> lines = split(text, '\n');
  for (size_t i = 0; i < lines.size(); ++i) {
    const size_t word = std::min(lines[i].find_first_not_of(" \t\r"), lines[i].size());
    const bool has_words = word < lines[i].size() && lines[i][word] != '#';
    if (has_words && lines[i].find('\t') < word) return i + 1;
  }
  return 0;
}

/// The one document of `text`; null when there is none. Parses twice: yaml-cpp takes a quote left open for
/// closed when the text ends in a line break, and with it swallows all keys that follow; it sees the mistake
/// when the last breaks are gone.
YAML::Node parse(const std::string& text, const std::string& name) {
  try {
    const int documents = count_documents(text.substr(0, text.find_last_not_of(" \r\n") + 1));
    if (documents > 1) {
      throw ConfigError(
          "[plan.config] {}: more than one YAML document; keep one, and remove '---' and stray characters "
          "between them",
          name);
    }
    return documents == 0 ? YAML::Node() : YAML::Load(text);
  } catch (const YAML::Exception& error) {
    if (const size_t line = line_with_tab(text)) {
      throw ConfigError(
          "[plan.config] {}:{}: the line is indented with a tab, which YAML does not allow; use spaces", name,
          line);
    }
    throw ConfigError("[plan.config] {}: not valid YAML: {}; correct the file", place(name, error.mark),
                      error.msg);
  }
}

}  // namespace

std::vector<Assignment> read_yaml(const std::string& text, const std::string& name) {
  const YAML::Node root = parse(text, name);
  if (root.IsNull()) return {};
  if (!root.IsMap()) {
    throw ConfigError(
        "[plan.config] {}: a config is a mapping of keys to values; begin with a line such as 'name: run'",
        place(name, root.Mark()));
  }
  return YamlReader(name).read(root);
}

}  // namespace trireme::plan
