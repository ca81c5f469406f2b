#include "trireme/kernels/allocation_watch.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace trireme::kernels {

class AllocationWatch::Listener final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* block, int64_t bytes, size_t, size_t, c10::Device) override {
    const std::lock_guard lock(mutex_);
    if (bytes > 0) {
      blocks_[block] = bytes;
      held_ += bytes;
      peak_ = std::max(peak_, held_);
    } else if (const auto found = blocks_.find(block); found != blocks_.end()) {
      held_ -= found->second;
      blocks_.erase(found);
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t held() const {
    const std::lock_guard lock(mutex_);
    return held_;
  }
  int64_t peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<void*, int64_t> blocks_;
  int64_t held_ = 0, peak_ = 0;
};

AllocationWatch::AllocationWatch()
    : listener_(std::make_shared<Listener>()), guard_(c10::DebugInfoKind::PROFILER_STATE, listener_) {}

AllocationWatch::~AllocationWatch() = default;

int64_t AllocationWatch::held() const {
  return listener_->held();
}

int64_t AllocationWatch::peak() const {
  return listener_->peak();
}

}  // namespace trireme::kernels
