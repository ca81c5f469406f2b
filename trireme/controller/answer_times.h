#pragma once
// Times that peers take to answer, by which one that is slow is told from one that is stopped.
#include <algorithm>
#include <array>
#include <cstddef>

namespace trireme::controller {

class AnswerTimes {
 public:
  void add(double seconds) {
    latest_[count_ % kKept] = seconds;
    ++count_;
  }
  /// The 99th percentile of the latest hundred: all but one of them were faster or as fast. Of fewer, the
  /// slowest; 0: none.
  double percentile_99() const {
    std::array<double, kKept> sorted = latest_;
    const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(std::min(count_, kKept));
    std::sort(sorted.begin(), end);
    if (count_ == 0) return 0.0;
    return *(end - (count_ < kKept ? 1 : 2));
  }

 private:
  static constexpr size_t kKept = 100;
  std::array<double, kKept> latest_{};
  size_t count_ = 0;
};

}  // namespace trireme::controller
