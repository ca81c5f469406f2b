// Bytes from one process to another of the same host: a ring in memory that both map. Each end moves its own
// counter; an end that finds nothing to do sleeps on the counter of the other.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "trireme/base/error.h"
#include "trireme/comm/byte_stream.h"
#include "trireme/comm/process_id.h"

namespace trireme::comm {
namespace {

constexpr uint32_t kRingBytes = uint32_t{4} << 20;  // a power of two, for counters wrap around
/// Moved at a time, so that the reader copies one piece while the writer copies the next.
constexpr uint32_t kPieceBytes = uint32_t{256} << 10;

/// One end's state; all zero at first.
struct alignas(64) Counter {
  std::atomic<uint32_t> moved;     ///< bytes written, or read, modulo 2^32; a futex
  std::atomic<uint32_t> sleepers;  ///< of the other end, on `moved`
  std::atomic<uint32_t> closed;
};
struct Ring {
  Counter written, taken;
  std::byte bytes[kRingBytes];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

class MemoryStream final : public ByteStream {
 public:
  MemoryStream(Ring* ring, bool writes)
      : ring_(ring),
        own_(writes ? ring->written : ring->taken),
        other_(writes ? ring->taken : ring->written),
        writes_(writes) {}
  MemoryStream(const MemoryStream&) = delete;
  MemoryStream& operator=(const MemoryStream&) = delete;
  ~MemoryStream() override {
    close();
    ::munmap(ring_, sizeof(Ring));
  }

  size_t write(std::span<const std::byte> bytes) override;
  size_t read(std::span<std::byte> bytes) override;
  void wait(std::chrono::milliseconds limit) override;
  void close() override;

 private:
  /// Bytes that this end could move now.
  uint32_t movable() const {
    const uint32_t filled = ring_->written.moved.load() - ring_->taken.moved.load();
    return writes_ ? kRingBytes - filled : filled;
  }
  template <typename Copy>
  size_t move(size_t wanted, const Copy& copy);

  Ring* ring_;
  Counter& own_;
  Counter& other_;
  bool writes_;
};

/// copy(in_ring, in_span, count) for up to two pieces, since the ring has an end.
template <typename Copy>
size_t MemoryStream::move(size_t wanted, const Copy& copy) {
  const bool alone = other_.closed.load() != 0;  // read first: the other end may move bytes and then close
  const auto count = static_cast<uint32_t>(std::min<size_t>({wanted, movable(), kPieceBytes}));
  if (alone && (writes_ || count == 0)) throw std::runtime_error("its end was closed");
  if (count == 0) return 0;
  const uint32_t moved = own_.moved.load(), first = moved % kRingBytes;
  const uint32_t before_end = std::min(count, kRingBytes - first);
  copy(ring_->bytes + first, size_t{0}, before_end);
  if (before_end < count) copy(ring_->bytes, size_t{before_end}, count - before_end);
  own_.moved.store(moved + count);
  if (own_.sleepers.load() > 0) futex(own_.moved, FUTEX_WAKE, INT32_MAX, nullptr);
  return count;
}

size_t MemoryStream::write(std::span<const std::byte> bytes) {
  return move(bytes.size(), [&](std::byte* in_ring, size_t first, size_t count) {
    std::memcpy(in_ring, bytes.data() + first, count);
  });
}

size_t MemoryStream::read(std::span<std::byte> bytes) {
  return move(bytes.size(), [&](const std::byte* in_ring, size_t first, size_t count) {
    std::memcpy(bytes.data() + first, in_ring, count);
  });
}

void MemoryStream::wait(std::chrono::milliseconds limit) {
  const timespec pause{.tv_sec = limit.count() / 1000, .tv_nsec = limit.count() % 1000 * 1'000'000};
  ++other_.sleepers;
  const uint32_t seen = other_.moved.load();
  const bool closed = own_.closed.load() != 0 || other_.closed.load() != 0;
  if (movable() == 0 && !closed) futex(other_.moved, FUTEX_WAIT, seen, &pause);
  --other_.sleepers;
}

void MemoryStream::close() {
  own_.closed = 1;
  for (Counter* const counter : {&own_, &other_}) futex(counter->moved, FUTEX_WAKE, INT32_MAX, nullptr);
}

Ring* map(int file) {
  void* const memory = ::mmap(nullptr, sizeof(Ring), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Ring*>(memory);
}

class MemoryStreamOffer final : public StreamOffer {
 public:
  explicit MemoryStreamOffer(int descriptor) : descriptor_(descriptor) {}
  MemoryStreamOffer(const MemoryStreamOffer&) = delete;
  MemoryStreamOffer& operator=(const MemoryStreamOffer&) = delete;
  ~MemoryStreamOffer() override { ::close(descriptor_); }

  std::string text() const override {
    return fmt::format("{} {} {}", host_identity(), ::getpid(), descriptor_);
  }
  std::unique_ptr<ByteStream> accept(double) override {
    Ring* const ring = map(descriptor_);
    if (ring == nullptr) throw CommError("[comm.make_link] {} bytes cannot be mapped", sizeof(Ring));
    return std::make_unique<MemoryStream>(ring, /*writes=*/false);
  }

 private:
  int descriptor_;
};

}  // namespace

std::unique_ptr<StreamOffer> offer_memory_stream() {
  const int descriptor = ::memfd_create("trireme", MFD_CLOEXEC);
  if (descriptor < 0) return nullptr;
  auto offer = std::make_unique<MemoryStreamOffer>(descriptor);
  // Reserves the pages now: without enough memory this fails here, and not with SIGBUS at the first write.
  return ::posix_fallocate(descriptor, 0, static_cast<off_t>(sizeof(Ring))) == 0 ? std::move(offer) : nullptr;
}

std::unique_ptr<ByteStream> open_memory_stream(const std::string& offer) {
  std::string host;
  pid_t pid = 0;
  int descriptor = -1;
  if (!(std::istringstream(offer) >> host >> pid >> descriptor) || host != host_identity()) return nullptr;
  const int file = ::open(fmt::format("/proc/{}/fd/{}", pid, descriptor).c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  Ring* const ring = map(file);
  ::close(file);
  return ring == nullptr ? nullptr : std::make_unique<MemoryStream>(ring, /*writes=*/true);
}

}  // namespace trireme::comm
