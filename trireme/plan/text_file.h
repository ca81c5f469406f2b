#pragma once
// Texts that a user names: configs, schedules and programs, of a size that somebody could have written; the
// words and numbers in them.
#include <charconv>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace trireme::plan {

/// The file's bytes. Throws ConfigError when there are more than `limit`, which may have no end, and
/// EnvironmentError naming path and cause when it cannot be read.
std::string read_text_file(const std::string& path, size_t limit);

/// Words of a line; a quoted one may hold blanks.
std::vector<std::string> words_of(std::string_view line);

/// The number that all of `text` is; none for other texts.
template <typename Number>
std::optional<Number> parse_whole_text(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace trireme::plan
