#pragma once
// How much memory of the heap is in use, as the C library counts it. Sanitizers, which have a heap of their
// own, count none.
#include <malloc.h>

#include <cstdint>

namespace trireme::testing {

inline int64_t heap_bytes() {
  const struct mallinfo2 info = ::mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

}  // namespace trireme::testing
