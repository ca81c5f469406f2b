#pragma once
// The report of a job that failed, in words: how each rank ended, what it did last, and for whom it waited.
// Pure.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/launch/local.h"

namespace trireme::launch {

/// The ranks for which `rank` waited in its last operation, since they had not begun it; empty when it was in
/// no operation, or when the ranks of the group are not known.
std::vector<int64_t> missed_by(const JobEnd& end, int64_t rank);

/// The rank with which the failure began. When `end.cause` lost a peer, it is a rank that had to be killed
/// since it did not stop, preferably one for which the cause waited. Otherwise, or when no rank had to be
/// killed, it is the rank of the cause. There must be a cause.
int64_t first_to_fail(const JobEnd& end);

/// Why the job failed: "rank 1 (pid 7) was killed by signal 9 (SIGKILL)", "rank 0 (pid 6) exited with code 5
/// (lost a peer or timed out): it was waiting for rank 1 in all_gather #41 of group dp; rank 1 (pid 7) did
/// not /// stop when told to and was killed (it had been stopped by a signal)". There must be a cause.
std::string cause_in_words(const JobEnd& end);

/// The cause, and of each rank how it ended and its last operations with their age in seconds at `now`
/// (since 1970). Lines end with a newline.
std::string crash_report(const JobEnd& end, double now);

}  // namespace trireme::launch
