#pragma once
// Faults at the system calls that write files. The test program defines these calls itself, so that every one
// of the code under test comes here first: it can end the process, as a power cut would, or fail.
#include <cstdint>
#include <string>

namespace trireme::checkpoint::testing {

/// What a power cut leaves of what was not synced.
enum class Unsynced {
  kKept,     ///< everything: the process alone was killed
  kEmptied,  ///< renames, but not the bytes of files
  kUndone,   ///< neither, nor the names of new files; zeros where bytes were
};

enum class Fault { kNone, kKill, kError, kShortWrite, kReserve, kRenameToFree };

struct FaultPlan {
  Fault fault = Fault::kNone;
  int64_t at = 0;  ///< number of the call, from 1; of kReserve, every fallocate fails, of kRenameToFree every
                   ///< renameat2
  int error = 0;   ///< errno for all but kKill and kShortWrite
  Unsynced unsynced = Unsynced::kKept;
};

inline constexpr int kKilled = 77;  ///< exit code of a process that kKill ended

/// Starts counting calls, with a fault at one of them.
void plan_fault(const FaultPlan& plan);
/// Calls since; the plan is gone.
int64_t end_faults();
/// Takes away what the plan says of what was not synced.
void cut_power();
/// Bytes of files that were told to go to the disk before fsync(), since plan_fault(); -1 where not in order.
int64_t bytes_begun();

}  // namespace trireme::checkpoint::testing
