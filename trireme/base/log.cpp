#include "trireme/base/log.h"

#include <unistd.h>

#include <atomic>
#include <ctime>
#include <mutex>

#include "trireme/base/error.h"

namespace trireme {
namespace {

std::atomic<LogLevel> level_setting{LogLevel::kInfo};
std::mutex prefix_mutex;
std::string prefix_setting;

constexpr std::string_view kNames[] = {"debug", "info", "warning", "error", "silent"};

}  // namespace

void set_log_level(LogLevel level) {
  level_setting = level;
}
LogLevel log_level() {
  return level_setting;
}

void set_log_prefix(std::string prefix) {
  const std::lock_guard lock(prefix_mutex);
  prefix_setting = std::move(prefix);
}

LogLevel parse_log_level(std::string_view text) {
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (text == kNames[i]) return static_cast<LogLevel>(i);
  }
  throw ConfigError("[base.log] log level '{}' is unknown; use debug, info, warning, error or silent", text);
}

void log_line(LogLevel level, std::string_view text) {
  if (level < level_setting.load()) return;
  const std::time_t now = std::time(nullptr);
  tm parts{};
  localtime_r(&now, &parts);
  std::string line = fmt::format("{:02}:{:02}:{:02} ", parts.tm_hour, parts.tm_min, parts.tm_sec);
  {
    const std::lock_guard lock(prefix_mutex);
    line += prefix_setting;
  }
  if (level != LogLevel::kInfo)
    fmt::format_to(std::back_inserter(line), "{}: ", kNames[static_cast<size_t>(level)]);
  line += text;
  line += '\n';
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace trireme
