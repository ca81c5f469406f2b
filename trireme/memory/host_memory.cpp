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

/// Of what torch's own allocator gives, which vector instructions rely on.
constexpr uintptr_t kAlignment = 64;

class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &std::free, device};
    void* const block = bytes <= kMost ? std::malloc(bytes + kAlignment) : nullptr;
    if (block == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);  // which says what failed
    const auto address = (reinterpret_cast<uintptr_t>(block) + kAlignment - 1) & ~(kAlignment - 1);
    return {reinterpret_cast<void*>(address), block, &std::free, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static constexpr size_t kMost = std::numeric_limits<size_t>::max() - kAlignment;
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
