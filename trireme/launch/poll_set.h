#pragma once
// One call of poll(2): each descriptor with the function to call when it is ready.
#include <poll.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace trireme::launch {

class PollSet {
 public:
  /// `react` is called when `fd` has one of `events` or is in error. A negative fd is left out.
  void watch(int fd, short events, std::function<void()> react) {
    if (fd < 0) return;
    fds_.push_back({.fd = fd, .events = events, .revents = 0});
    reactions_.push_back(std::move(react));
  }

  /// Waits for the first event, at most `timeout_s` (forever without one), then reacts in the order of
  /// watch().
  void wait(std::optional<double> timeout_s) {
    const int timeout_ms = timeout_s ? static_cast<int>(std::ceil(1e3 * std::max(0.0, *timeout_s))) : -1;
    if (::poll(fds_.data(), fds_.size(), timeout_ms) <= 0) return;
    for (size_t i = 0; i < fds_.size(); ++i) {
      if (fds_[i].revents != 0) reactions_[i]();
    }
  }

 private:
  std::vector<pollfd> fds_;
  std::vector<std::function<void()>> reactions_;
};

}  // namespace trireme::launch
