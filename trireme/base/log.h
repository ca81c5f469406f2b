#pragma once
// Log lines on stderr: "HH:MM:SS [r1] warning: text". Results belong on stdout and do not pass through here.
#include <fmt/format.h>

#include <string>
#include <string_view>

namespace trireme {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kSilent };

/// The lowest level that is printed from now on, of the whole process.
void set_log_level(LogLevel level);
/// The lowest level that is printed.
LogLevel log_level();
/// The prefix of every line, such as "[r1] "; empty: none.
void set_log_prefix(std::string prefix);

/// Parses "debug", "info", "warning", "error" or "silent"; throws ConfigError for anything else.
LogLevel parse_log_level(std::string_view text);

/// Writes one line in one write call, so that lines of threads and ranks never mix.
void log_line(LogLevel level, std::string_view text);

/// A line with fmt's format and arguments, if its level is printed. Debug and info lines are formatted only
/// then.
template <typename... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() <= LogLevel::kDebug)
    log_line(LogLevel::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  if (log_level() <= LogLevel::kInfo)
    log_line(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log_line(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace trireme
