#pragma once
// Host memory that GPUs read and write at the full speed of their link, beside everything else that they do.
// Several threads take it from the system, and no more than was asked for; torch's allocator of pinned memory
// takes the next power of two.
#include <cstddef>
#include <cstdint>
#include <string>

namespace trireme::kernels {

class PinnedMemory {
 public:
  /// Sizes are multiples of this, the size of the kernel's huge pages.
  static constexpr int64_t kPage = int64_t{2} << 20;

  PinnedMemory() = default;
  /// At least `bytes` of zeros. Throws EnvironmentError when the system has not so much address space,
  /// std::system_error when it has no thread to spare.
  explicit PinnedMemory(int64_t bytes);
  PinnedMemory(PinnedMemory&& other) noexcept { swap(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~PinnedMemory();

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  /// Why the memory could not be pinned, so that the host waits while a GPU copies; empty: it is pinned.
  const std::string& problem() const { return problem_; }

 private:
  void swap(PinnedMemory& other) noexcept;

  void* data_ = nullptr;
  int64_t bytes_ = 0;
  bool pinned_ = false;
  std::string problem_;
};

}  // namespace trireme::kernels
