#pragma once
// Signs of life. A working thread gives one whenever it has got on: an operation, a micro-batch, a piece of a
// file. A thread that did nothing else would go on while a disk hangs.
#include <atomic>
#include <cstdint>

namespace trireme {

/// One more sign of life of this process. Costs an increment; any thread may call.
void beat() noexcept;

/// Counts them in `count` from here on, which must live as long as the process. Our launcher reads it.
void count_beats_in(std::atomic<uint64_t>& count) noexcept;

}  // namespace trireme
