#pragma once
// Whether a job whose ranks have failed is started again, and when. Pure.
#include <cstdint>

#include "trireme/launch/local.h"

namespace trireme::launch {

/// Whether the same job may succeed when it is started again: a rank was killed by a signal, for want of
/// memory as well, since the memory of a host is shared; it lost a peer or a deadline (kCommunication), its
/// machine (kEnvironment), or failed with a code that says nothing, as when a GPU is lost. Not when nothing
/// failed, when a rank was told to stop (stopped_in_order()), nor for what would come again: kUsage,
/// kOutOfMemory of its own, kNumerics, kCorruptData, kComparison. Whether the launcher was told to stop is
/// for the caller.
bool may_start_again(const JobEnd& end);

/// How often a job is started again, and after how long. A budget bounds attempts that get nowhere: progress
/// gives it back.
class Restarts {
 public:
  static constexpr double kLongestDelay_s = 60.0;

  /// `most` in a row without progress; the first after `first_delay_s` seconds, each further one after twice
  /// as long, at most kLongestDelay_s.
  Restarts(int64_t most, double first_delay_s) : most_(most), first_delay_s_(first_delay_s) {}

  /// The job has got further than ever before.
  void note_progress() { used_ = 0; }
  bool left() const { return used_ < most_; }
  /// Uses one up. Returns the seconds to wait before it.
  double take();

  int64_t used() const { return used_; }  ///< since the last progress
  int64_t most() const { return most_; }

 private:
  int64_t most_;
  double first_delay_s_;
  int64_t used_ = 0;
};

}  // namespace trireme::launch
