#include "trireme/plan/yaml_text.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

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

}  // namespace

std::string place_of(const std::string& name, const YAML::Mark& mark) {
  return mark.is_null() ? name : fmt::format("{}:{}:{}", name, mark.line + 1, mark.column + 1);
}

YAML::Node parse_yaml(const std::string& text, const std::string& name, std::string_view where) {
  // Parses twice: yaml-cpp takes a quote left open for closed when the text ends in a line break, and with it
  // swallows all keys that follow; it sees the mistake when the last breaks are gone.
  try {
    const int documents = count_documents(text.substr(0, text.find_last_not_of(" \r\n") + 1));
    if (documents > 1) {
      throw ConfigError(
          "[{}] {}: more than one YAML document; keep one, and remove '---' and stray characters "
          "between them",
          where, name);
    }
    return documents == 0 ? YAML::Node() : YAML::Load(text);
  } catch (const YAML::Exception& error) {
    if (const size_t line = line_with_tab(text)) {
      throw ConfigError("[{}] {}:{}: the line is indented with a tab, which YAML does not allow; use spaces",
                        where, name, line);
    }
    throw ConfigError("[{}] {}: not valid YAML: {}; correct the file", where, place_of(name, error.mark),
                      error.msg);
  }
}

}  // namespace trireme::plan
