#pragma once
// Sleeping on a counter in memory that processes share (futex(2)).
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

namespace trireme::comm {

static_assert(std::atomic<uint32_t>::is_always_lock_free);

/// Sleeps while the word is `seen`, for `pause` at most. False when that time has passed.
inline bool sleep_while(std::atomic<uint32_t>& word, uint32_t seen, const timespec& pause) {
  auto* const address = reinterpret_cast<uint32_t*>(&word);
  return ::syscall(SYS_futex, address, FUTEX_WAIT, seen, &pause, nullptr, 0) == 0 || errno != ETIMEDOUT;
}

/// Wakes all that sleep on it.
inline void wake_sleepers(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace trireme::comm
