#pragma once
// What the tests of schedules share.
#include "trireme/plan/schedule.h"

namespace trireme::plan {

/// Floating-point times that should be equal differ by less.
inline constexpr double kNear = 1e-9;

/// Whether the schedule takes more than one stage a rank, as many as it is asked for.
inline bool has_chunks(ScheduleName name) {
  return name == ScheduleName::kInterleaved1F1B || name == ScheduleName::kLoopedBfs ||
         name == ScheduleName::kInterleavedZb;
}

}  // namespace trireme::plan
