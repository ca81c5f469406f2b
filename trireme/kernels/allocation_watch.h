#pragma once
// Counts the memory that torch's allocators report as given out, on a CPU and on a GPU.
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace trireme::kernels {

/// While it lives it counts what this thread, and autograd's threads on its behalf, take from torch's
/// allocators: blocks as they were given out, those of a GPU rounded up to 512 bytes. Not to be held while
/// torch's profiler runs, which listens at the same place.
class AllocationWatch {
 public:
  AllocationWatch();
  ~AllocationWatch();
  AllocationWatch(const AllocationWatch&) = delete;
  AllocationWatch& operator=(const AllocationWatch&) = delete;

  /// Bytes of blocks taken since the beginning and not given back. Blocks that are older do not count.
  int64_t held() const;
  /// The largest value of held() so far.
  int64_t peak() const;

 private:
  class Listener;
  std::shared_ptr<Listener> listener_;
  c10::DebugInfoGuard guard_;
};

}  // namespace trireme::kernels
