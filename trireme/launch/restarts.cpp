#include "trireme/launch/restarts.h"

#include <algorithm>
#include <cmath>

#include "trireme/base/error.h"

namespace trireme::launch {

bool may_start_again(const JobEnd& end) {
  if (!end.cause || stopped_in_order(*end.cause)) return false;
  if (end.cause->starved || end.cause->end.signal != 0) return true;
  switch (static_cast<ExitCode>(end.cause->end.code)) {
    case ExitCode::kUsage:
    case ExitCode::kOutOfMemory:
    case ExitCode::kNumerics:
    case ExitCode::kCorruptData:
    case ExitCode::kComparison:
      return false;
    default:
      return true;
  }
}

double Restarts::take() {
  TRIREME_CHECK(left(), "[launch.restarts] all {} restarts are used up", most_);
  const double delay = first_delay_s_ * std::exp2(static_cast<double>(used_++));
  return std::min(delay, std::max(first_delay_s_, kLongestDelay_s));
}

}  // namespace trireme::launch
