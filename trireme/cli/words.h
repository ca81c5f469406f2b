#pragma once
// Words that several verbs print.
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "trireme/base/text.h"

namespace trireme::cli {

inline std::string bytes_text(int64_t bytes) {
  return format_bytes(static_cast<double>(bytes));
}

/// 0.125 -> "12.5%".
inline std::string percent(double share) {
  return fmt::format("{:.1f}%", 100.0 * share);
}

/// "1 token", "1,234 tokens".
inline std::string counted(int64_t count, const char* noun) {
  return fmt::format("{} {}{}", with_commas(count), noun, count == 1 ? "" : "s");
}

/// The last line that is not empty, where a program that failed says why; `silence` where there is none.
inline std::string last_line(const std::string& text, const char* silence) {
  std::vector<std::string> lines = split(text, '\n');
  std::erase(lines, "");
  return lines.empty() ? silence : lines.back();
}

}  // namespace trireme::cli
