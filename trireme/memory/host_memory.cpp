#include "trireme/memory/host_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace trireme::memory {
namespace {

/// The alignment of what torch's own allocator gives, which vector instructions rely on.
constexpr uintptr_t kAlignment = 64;

/// The block that malloc gave lies at most so far in front of the memory of a tensor, and its address just
/// there.
constexpr size_t kInFront = kAlignment + sizeof(void*);

void*& block_of(void* memory) {
  return static_cast<void**>(memory)[-1];
}

void release(void* memory) {
  if (memory == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(memory);
  std::free(block_of(memory));
}

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    void* const block = bytes <= kMost ? std::malloc(bytes + kInFront) : nullptr;
    if (block == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);  // which says what failed
    const uintptr_t first = reinterpret_cast<uintptr_t>(block) + sizeof(void*);
    void* const memory = reinterpret_cast<void*>((first + kAlignment - 1) & ~(kAlignment - 1));
    block_of(memory) = block;
    c10::profiledCPUMemoryReporter().New(memory, bytes);
    return {memory, memory, &release, device};
  }
  /// Libraries that torch calls allocate without a DataPtr.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static constexpr size_t kMost = std::numeric_limits<size_t>::max() - kInFront;
};

}  // namespace

void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 64 << 20);
  static HostAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
}

}  // namespace trireme::memory
