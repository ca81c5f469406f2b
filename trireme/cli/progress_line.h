#pragma once
// A line of the terminal that says how far a command has come; nothing where stderr is none.
#include <unistd.h>

#include <string>
#include <string_view>

#include "trireme/base/clock.h"
#include "trireme/base/streams.h"
#include "trireme/base/terminal.h"

namespace trireme::cli {

/// Gone at the end of the scope. Not for several threads at once.
class ProgressLine {
 public:
  ProgressLine() = default;
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  ~ProgressLine() { clear(); }

  /// Whether it is time for another text(), which is never where there is no terminal.
  bool due() {
    if (monotonic_seconds() - drawn_at_ < kPeriod_s) return false;
    drawn_at_ = monotonic_seconds();
    return terminal_columns(STDERR_FILENO) > 0;
  }

  void show(std::string_view text) {
    const auto columns = static_cast<size_t>(terminal_columns(STDERR_FILENO));
    write_stderr("\r" + std::string(text.substr(0, columns > 0 ? columns - 1 : 0)) + "\x1b[K");
    visible_ = true;
  }

  void clear() {
    if (visible_) write_stderr("\r\x1b[K");
    visible_ = false;
  }

 private:
  static constexpr double kPeriod_s = 0.1;  // faster than this nobody reads
  bool visible_ = false;
  double drawn_at_ = -kPeriod_s;
};

}  // namespace trireme::cli
