#pragma once
// Threads that share work, as many of them as the system lets a process have.
#include <cstdint>
#include <functional>

namespace trireme {

/// Calls `start_one`, which starts a thread, `wanted` times, or until the system has no more of them: then a
/// warning says with how many the work goes on. Throws EnvironmentError where these are fewer than `least`;
/// threads that were started are the caller's to end. Other errors of `start_one` pass through.
void start_threads(int64_t wanted, int64_t least, const std::function<void()>& start_one);

}  // namespace trireme
