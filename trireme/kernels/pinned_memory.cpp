#include "trireme/kernels/pinned_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/kernels/device.h"

namespace trireme::kernels {
namespace {

constexpr int64_t kMostThreads = 8;
constexpr int64_t kSmallestPage = 4096;

/// A page is taken by the first write to it, and most of the time goes into clearing it.
void touch(std::byte* begin, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kSmallestPage) static_cast<volatile std::byte&>(begin[at]) = {};
}

void touch_by_threads(std::byte* data, int64_t bytes) {
  const int64_t cores = std::max(1U, std::thread::hardware_concurrency());
  const int64_t pages = bytes / PinnedMemory::kPage;
  const int64_t threads = std::clamp<int64_t>(cores / 2, 1, std::min(kMostThreads, pages));
  std::vector<std::jthread> helpers;
  for (int64_t i = 0; i < threads; ++i) {
    const int64_t first = pages * i / threads, end = pages * (i + 1) / threads;
    helpers.emplace_back(touch, data + first * PinnedMemory::kPage, (end - first) * PinnedMemory::kPage);
  }
}

}  // namespace

// Where this throws after the first constructor, the destructor gives the memory back.
PinnedMemory::PinnedMemory(int64_t bytes) : PinnedMemory() {
  if (bytes <= 0) return;
  const int64_t size = (bytes + kPage - 1) / kPage * kPage;
  void* const data =
      ::mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw EnvironmentError("[kernels.pinned_memory] cannot allocate {} bytes of host memory: {}", size,
                           std::strerror(errno));
  }
  data_ = data;
  bytes_ = size;
  ::madvise(data, static_cast<size_t>(size), MADV_HUGEPAGE);  // where the kernel has them
  touch_by_threads(static_cast<std::byte*>(data), size);
  const int status = pin(data, size);
  pinned_ = status == 0;
  if (!pinned_) problem_ = gpu_error_text(status);
}

PinnedMemory::~PinnedMemory() {
  if (data_ == nullptr) return;
  if (pinned_) unpin(data_);
  ::munmap(data_, static_cast<size_t>(bytes_));
}

void PinnedMemory::swap(PinnedMemory& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(pinned_, other.pinned_);
  std::swap(problem_, other.problem_);
}

}  // namespace trireme::kernels
