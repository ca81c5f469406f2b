// Bytes from one process to another of the same host: a ring in memory that both map. Each end moves its own
// counter; an end that finds nothing to do sleeps on the counter of the other.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "trireme/comm/byte_stream.h"
#include "trireme/comm/futex.h"
#include "trireme/comm/shared_pages.h"

namespace trireme::comm {
namespace {

constexpr uint32_t kRingBytes = uint32_t{1} << 20;  // a power of two, for counters wrap around
/// Moved at a time, so that the reader copies one piece while the writer copies the next.
constexpr uint32_t kPieceBytes = uint32_t{128} << 10;

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

class MemoryStream final : public ByteStream {
 public:
  MemoryStream(std::shared_ptr<SharedPages> pages, bool writes)
      : pages_(std::move(pages)),
        ring_(static_cast<Ring*>(pages_->data())),
        own_(writes ? ring_->written : ring_->taken),
        other_(writes ? ring_->taken : ring_->written),
        writes_(writes) {}
  MemoryStream(const MemoryStream&) = delete;
  MemoryStream& operator=(const MemoryStream&) = delete;
  ~MemoryStream() override { MemoryStream::close(); }

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

  std::shared_ptr<SharedPages> pages_;
  Ring* ring_;
  Counter& own_;
  Counter& other_;
  bool writes_;
};

/// copy(in_ring, in_span, count) for up to two pieces, since the ring has an end.
template <typename Copy>
size_t MemoryStream::move(size_t wanted, const Copy& copy) {
  if (own_.closed.load() != 0) throw std::runtime_error("it was closed on this rank");
  const bool alone = other_.closed.load() != 0;  // read first: the other end may move bytes and then close
  const auto count = static_cast<uint32_t>(std::min<size_t>({wanted, movable(), kPieceBytes}));
  if (alone && (writes_ || count == 0)) throw std::runtime_error("the rank closed it");
  if (count == 0) return 0;
  const uint32_t moved = own_.moved.load(), first = moved % kRingBytes;
  const uint32_t before_end = std::min(count, kRingBytes - first);
  copy(ring_->bytes + first, size_t{0}, before_end);
  if (before_end < count) copy(ring_->bytes, size_t{before_end}, count - before_end);
  own_.moved.store(moved + count);
  if (own_.sleepers.load() > 0) wake_sleepers(own_.moved);
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
  if (movable() == 0 && !closed) sleep_while(other_.moved, seen, pause);
  --other_.sleepers;
}

void MemoryStream::close() {
  own_.closed = 1;
  for (Counter* const counter : {&own_, &other_}) wake_sleepers(counter->moved);
}

class MemoryStreamOffer final : public StreamOffer {
 public:
  explicit MemoryStreamOffer(std::shared_ptr<SharedPages> pages) : pages_(std::move(pages)) {}
  std::string text() const override { return pages_->text(); }
  std::unique_ptr<ByteStream> accept(double) override {
    return std::make_unique<MemoryStream>(pages_, /*writes=*/false);
  }

 private:
  std::shared_ptr<SharedPages> pages_;
};

}  // namespace

std::unique_ptr<StreamOffer> offer_memory_stream() {
  std::shared_ptr<SharedPages> pages = SharedPages::make(sizeof(Ring));
  return pages ? std::make_unique<MemoryStreamOffer>(std::move(pages)) : nullptr;
}

std::unique_ptr<ByteStream> open_memory_stream(const std::string& offer) {
  std::shared_ptr<SharedPages> pages = SharedPages::open(offer, sizeof(Ring));
  return pages ? std::make_unique<MemoryStream>(std::move(pages), /*writes=*/true) : nullptr;
}

}  // namespace trireme::comm
