#include "trireme/report/config_entries.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "trireme/base/text.h"

namespace trireme::report {
namespace {

/// "# 3 more" does not begin a comment inside quotes.
size_t comment_begin(std::string_view line) {
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (quote == '"' && line[i] == '\\') {
      ++i;
    } else if (quote != 0) {
      if (line[i] == quote) quote = 0;
    } else if (line[i] == '"' || line[i] == '\'') {
      quote = line[i];
    } else if (line[i] == '#' && (i == 0 || line[i - 1] == ' ')) {
      return i;
    }
  }
  return line.size();
}

std::string without_blanks(std::string_view text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string_view::npos) return {};
  return std::string(text.substr(begin, text.find_last_not_of(' ') + 1 - begin));
}

}  // namespace

bool was_given(const ConfigEntry& entry) {
  return !entry.origin.empty() && entry.origin != "default" && !entry.origin.starts_with("derived");
}

std::vector<ConfigEntry> read_config_entries(const std::string& yaml) {
  std::vector<ConfigEntry> entries;
  std::string section;
  for (const std::string& line : split(yaml, '\n')) {
    const size_t comment = comment_begin(line), colon = line.find(": ");
    const std::string text = without_blanks(std::string_view(line).substr(0, comment));
    if (text.empty()) continue;
    const bool inside = line.front() == ' ';
    if (text.back() == ':' && !inside) {
      section = text.substr(0, text.size() - 1);
      continue;
    }
    if (colon == std::string::npos || colon >= comment) continue;
    const std::string word = without_blanks(std::string_view(line).substr(0, colon));
    entries.push_back({.key = inside ? section + "." + word : word,
                       .value = without_blanks(std::string_view(line).substr(colon + 2, comment - colon - 2)),
                       .origin = comment == line.size() ? "" : without_blanks(line.substr(comment + 1))});
  }
  return entries;
}

std::string config_text(const std::vector<ConfigEntry>& entries) {
  std::vector<std::string> lines, origins;
  std::string open;
  for (const ConfigEntry& entry : entries) {
    const size_t dot = entry.key.find('.');
    const std::string section = dot == std::string::npos ? "" : entry.key.substr(0, dot);
    if (section != open && !section.empty()) {
      lines.push_back(section + ":");
      origins.emplace_back();
    }
    open = section;
    const std::string word = dot == std::string::npos ? entry.key : "  " + entry.key.substr(dot + 1);
    lines.push_back(word + ": " + entry.value);
    origins.push_back(entry.origin);
  }
  size_t width = 0;
  for (const std::string& line : lines) width = std::max(width, line.size());
  std::string text;
  for (size_t i = 0; i < lines.size(); ++i)
    text += origins[i].empty() ? lines[i] + "\n" : fmt::format("{:<{}}  # {}\n", lines[i], width, origins[i]);
  return text;
}

std::string with_origins_of(const std::string& before, const std::string& yaml) {
  const std::vector<ConfigEntry> known = read_config_entries(before);
  std::vector<ConfigEntry> entries = read_config_entries(yaml);
  if (entries.empty()) return yaml;
  for (ConfigEntry& entry : entries) {
    const auto same = std::ranges::find(known, entry.key, &ConfigEntry::key);
    if (same != known.end() && same->value == entry.value) entry.origin = same->origin;
  }
  return config_text(entries);
}

bool same_values(const std::string& a, const std::string& b) {
  const auto same = [](const ConfigEntry& one, const ConfigEntry& other) {
    return one.key == other.key && one.value == other.value;
  };
  const std::vector<ConfigEntry> first = read_config_entries(a), second = read_config_entries(b);
  return a == b || (!first.empty() && std::ranges::equal(first, second, same));
}

}  // namespace trireme::report
