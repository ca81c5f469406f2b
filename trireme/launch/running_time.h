#pragma once
// Time for the deadlines of a launcher: that in which it ran itself. Whoever suspends a job suspends its
// ranks as well, and these have their time when it goes on.
#include <algorithm>

#include "trireme/base/clock.h"

namespace trireme::launch {

class RunningTime {
 public:
  /// Seconds so far.
  double seconds() {
    const double now = monotonic_seconds();
    passed_s_ += std::min(now - looked_at_, patience_s_ + kWokenLate_s);
    looked_at_ = now;
    return passed_s_;
  }
  /// Until the next look this process waits for at most so long: what goes beyond it was suspension.
  void wait_for(double patience_s) {
    seconds();
    patience_s_ = std::max(patience_s, 0.0);
  }

 private:
  static constexpr double kWokenLate_s = 0.1;  ///< where others take the cores

  double passed_s_ = 0.0, patience_s_ = 0.0;
  double looked_at_ = monotonic_seconds();
};

}  // namespace trireme::launch
