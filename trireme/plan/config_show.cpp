// The config for readers: YAML, JSON schema, help text.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "trireme/base/text.h"
#include "trireme/plan/config_internal.h"

namespace trireme::plan {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// "train.steps" -> {"train", "steps"}; "name" -> {"", "name"}.
std::pair<std::string, std::string> split_key(const std::string& key) {
  const size_t dot = key.find('.');
  if (dot == std::string::npos) return {"", key};
  return {key.substr(0, dot), key.substr(dot + 1)};
}

struct Line {
  std::string text;
  std::string comment;
};

std::vector<Line> yaml_lines(const ResolvedConfig& resolved) {
  Config config = resolved.config;
  std::vector<Line> lines;
  std::string open_section;
  for (const Field& field : fields(config)) {
    const auto [section, word] = split_key(field.key);
    if (section != open_section) lines.push_back({section + ":", ""});
    open_section = section;
    const auto origin = resolved.origins.find(field.key);
    lines.push_back({fmt::format("{}{}: {}", section.empty() ? "" : "  ", word, format_value(field)),
                     origin == resolved.origins.end() ? "" : origin->second});
  }
  return lines;
}

template <typename Projection>
size_t widest(const std::vector<Line>& lines, Projection projection) {
  size_t width = 0;
  for (const Line& line : lines) width = std::max(width, projection(line).size());
  return width;
}

/// A control character in an origin (a file's name) must not end the comment.
std::string one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20; }, '?');
  return text;
}

OrderedJson default_value(const Field& field) {
  return std::visit([](const auto& value) { return OrderedJson(value); }, value_of(field));
}

OrderedJson schema_of(const Field& field) {
  OrderedJson schema = {
      {"description", field.help}, {"type", type_name(field)}, {"default", default_value(field)}};
  if (field.is_mapping) schema["type"] = {"object", "string"};
  if (!field.choices.empty()) schema["enum"] = field.choices;
  if (field.min) schema["minimum"] = *field.min;
  if (field.max) schema["maximum"] = *field.max;
  return schema;
}

OrderedJson empty_object(const std::string& description) {
  return {{"description", description},
          {"type", "object"},
          {"additionalProperties", false},
          {"properties", OrderedJson::object()}};
}

}  // namespace

std::vector<std::string> differing_keys(const Config& a, const Config& b) {
  Config first = a, second = b;
  const std::vector<Field> ours = fields(first), theirs = fields(second);
  std::vector<std::string> keys;
  for (size_t i = 0; i < ours.size(); ++i) {
    if (value_of(ours[i]) != value_of(theirs[i])) keys.push_back(ours[i].key);
  }
  return keys;
}

std::string to_yaml(const ResolvedConfig& resolved, bool with_origins) {
  const std::vector<Line> lines = yaml_lines(resolved);
  const size_t width = widest(lines, [](const Line& line) -> const std::string& { return line.text; });
  std::string yaml;
  for (const Line& line : lines) {
    const bool comment = with_origins && !line.comment.empty();
    yaml +=
        comment ? fmt::format("{:<{}}  # {}\n", line.text, width, one_line(line.comment)) : line.text + "\n";
  }
  return yaml;
}

std::string json_schema() {
  Config defaults;
  OrderedJson root = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                      {"title", "Trireme run configuration"}};
  root.update(empty_object("Every key is optional; the command line and TRIREME__SECTION__KEY override it."));
  for (const Field& field : fields(defaults)) {
    const auto [section, word] = split_key(field.key);
    OrderedJson& properties = root["properties"];
    if (section.empty()) {
      properties[word] = schema_of(field);
      continue;
    }
    if (!properties.contains(section)) properties[section] = empty_object("Keys of " + section);
    properties[section]["properties"][word] = schema_of(field);
  }
  return root.dump(2) + "\n";
}

std::vector<Field> fields_named(std::vector<Field> table, std::string_view word) {
  const auto plain = [](std::string_view text) {
    std::string result(text);
    std::ranges::transform(result, result.begin(), [](unsigned char letter) {
      return letter == '-' ? '_' : static_cast<char>(std::tolower(letter));
    });
    return result;
  };
  std::erase_if(table, [wanted = plain(word), &plain](const Field& field) {
    return plain(field.key).find(wanted) == std::string::npos;
  });
  return table;
}

std::string describe_fields(const std::vector<Field>& table) {
  std::vector<std::string> left;
  size_t key_width = 0, left_width = 0;
  for (const Field& field : table) key_width = std::max(key_width, field.key.size());
  for (const Field& field : table) {
    left.push_back(
        fmt::format("{:<{}}  {:<7}  {}", field.key, key_width, type_name(field), format_value(field)));
    left_width = std::max(left_width, left.back().size());
  }
  std::string text;
  for (size_t i = 0; i < table.size(); ++i) {
    const std::string allowed = allowed_values(table[i]);
    text += fmt::format("{:<{}}  {}{}\n", left[i], left_width, table[i].help,
                        allowed.empty() ? "" : " [" + allowed + "]");
  }
  return text;
}

}  // namespace trireme::plan
