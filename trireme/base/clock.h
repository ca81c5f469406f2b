#pragma once
// Two clocks: one for durations, one for timestamps in files.
#include <string>

namespace trireme {

/// Seconds of the monotonic clock; only differences mean something.
double monotonic_seconds();

/// Now in UTC as RFC 3339 with microseconds: 2026-11-20T08:15:03.123456Z.
std::string utc_timestamp();

/// Now in UTC for file names: 20261120-081503Z.
std::string utc_compact();

/// Seconds since this process was started by exec, as the kernel counts them.
double seconds_since_exec();

}  // namespace trireme
