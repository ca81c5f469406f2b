#include "trireme/comm/host_link.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/comm/checks.h"
#include "trireme/comm/peer_news.h"
#include "trireme/comm/progress_board.h"

namespace trireme::comm {
namespace {

using State = ProgressBoard::State;

/// How often an end that waits checks that the other process runs.
constexpr auto kLookAround = std::chrono::milliseconds(100);

/// What travels ahead of a tensor's bytes.
struct Header {
  int64_t sequence = 0;
  int64_t bytes = 0;
  int64_t dtype = 0;
};

/// A tensor on its way, or the place of one.
struct Parcel {
  at::Tensor tensor;
  std::byte* data = nullptr;
  int64_t sequence = 0;

  int64_t bytes() const { return static_cast<int64_t>(tensor.nbytes()); }
  std::string in_words() const {
    if (!tensor.defined()) return {};
    return fmt::format("{} bytes of {} ({})", bytes(), c10::toString(tensor.scalar_type()),
                       fmt::join(tensor.sizes(), ", "));
  }
};

/// The two ends disagree about a tensor.
class Mismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class HostLink : public Link {
 public:
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  void send(const at::Tensor&) override { throw_other_end("send"); }
  void post(const at::Tensor&) override { throw_other_end("recv"); }
  at::Tensor wait() override { throw_other_end("recv"); }
  void flush() override { throw_other_end("flush"); }
  int64_t sent_bytes() const override { return 0; }

 protected:
  HostLink(LinkEnd end, std::unique_ptr<ByteStream> stream)
      : end_(std::move(end)), stream_(std::move(stream)) {}

  /// Of the class that is being destroyed: its thread uses what it overrides.
  void start() {
    thread_ = std::thread([this] { run(); });
  }
  void stop();

  void check(const char* operation, const at::Tensor& tensor) const {
    check_tensor({operation, end_.name, 2, c10::kCPU}, "tensor", tensor);
  }
  /// Waits until `done`; throws when the link is lost or nothing has moved within the deadline. `parcel` is
  /// what it waits for.
  template <typename Done>
  void wait_until(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel,
                  const Done& done);
  /// Throws when the link is lost.
  void check_alive(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel);

  /// On the thread: move() moves some bytes and returns how many. Throws when the link is lost or stopped.
  template <typename Bytes, typename Move>
  void move_all(Bytes bytes, const Move& move);
  /// Moves the next parcel, on the thread. `mutex_` is not held.
  virtual void carry(const Parcel& parcel) = 0;

  LinkEnd end_;
  std::unique_ptr<ByteStream> stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Parcel> parcels_;  ///< senders drop those that have left, receivers those that were waited for
  size_t carried_ = 0;          ///< of those kept
  int64_t sequence_ = 0;

 private:
  [[noreturn]] void throw_other_end(const char* operation) const {
    throw LogicError("[comm.{}] rank {} is the {} of link {}; call it on rank {}", operation, end_.rank(),
                     end_.sends ? "sender" : "receiver", end_.name, end_.peer());
  }
  void run();
  [[noreturn]] void fail(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel,
                         double waited_s);

  std::atomic<double> last_moved_ = 0.0;
  std::atomic<bool> stopping_ = false;
  std::string lost_;  ///< why the thread has ended
  bool mismatch_ = false;
  std::string failure_;  ///< what was thrown
  std::thread thread_;
};

void HostLink::run() {
  std::unique_lock lock(mutex_);
  try {
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || carried_ < parcels_.size(); });
      if (stopping_) return;
      Parcel parcel = parcels_[carried_];
      lock.unlock();
      carry(parcel);
      parcel = Parcel();
      lock.lock();
      if (end_.sends) {
        parcels_.pop_front();
      } else {
        ++carried_;
      }
      changed_.notify_all();
    }
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) lock.lock();
    lost_ = error.what();
    mismatch_ = dynamic_cast<const Mismatch*>(&error) != nullptr;
    changed_.notify_all();
  }
}

void HostLink::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  stream_->close();
  thread_.join();
}

template <typename Bytes, typename Move>
void HostLink::move_all(Bytes bytes, const Move& move) {
  std::string lost;
  while (!bytes.empty()) {
    if (stopping_) throw std::runtime_error("it was closed here");
    const size_t count = move(bytes);
    bytes = bytes.subspan(count);
    if (count > 0) {
      last_moved_ = monotonic_seconds();
      lost.clear();
      continue;
    }
    // What a process has written before it died can still be read.
    if (!lost.empty()) throw std::runtime_error(lost);
    const double before = monotonic_seconds();
    stream_->wait(kLookAround);
    const bool quiet =
        monotonic_seconds() - before > 0.5 * std::chrono::duration<double>(kLookAround).count();
    if (quiet) lost = end_.news->about({end_.peer()});
  }
}

template <typename Done>
void HostLink::wait_until(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel,
                          const Done& done) {
  const double started = monotonic_seconds();
  end_.board->note(State::kInside, {operation, parcel.sequence, end_.name}, parcel.in_words());
  while (!done() && lost_.empty() && failure_.empty()) {
    const double waited = monotonic_seconds() - std::max(started, last_moved_.load());
    if (waited >= end_.timeout_s) fail(lock, operation, parcel, monotonic_seconds() - started);
    changed_.wait_for(lock, std::chrono::duration<double>(end_.timeout_s - waited));
  }
  if (!done()) fail(lock, operation, parcel, monotonic_seconds() - started);
  end_.board->note(State::kDone, {operation, parcel.sequence, end_.name}, parcel.in_words());
}

void HostLink::check_alive(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel) {
  if (!lost_.empty() || !failure_.empty()) fail(lock, operation, parcel, 0.0);
}

/// Closes the link, so that the other end need not wait for its deadline.
void HostLink::fail(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel,
                    double waited_s) {
  if (failure_.empty()) {
    const std::string what = lost_.empty() ? fmt::format("waited in vain for rank {}", end_.peer())
                             : mismatch_   ? lost_
                                           : fmt::format("lost rank {}: {}", end_.peer(), lost_);
    lock.unlock();
    stream_->close();
    const Operation failed{operation, parcel.sequence, end_.name};
    const ProgressBoard::Report others =
        end_.board->report_failure(failed, {end_.from, end_.to}, parcel.in_words());
    lock.lock();
    failure_ = fmt::format(
        "[comm.{}] {} {} on rank {} after {:.1f} s (deadline {:g} s): {}; {}", operation,
        in_words(failed, parcel.in_words()), what, end_.rank(), waited_s, end_.timeout_s, others.text,
        mismatch_ ? "both ends must send and receive tensors of the same sizes in the same order"
                  : "look at the log of that rank, and raise the timeout if it is only slow");
  }
  if (mismatch_) throw LogicError("{}", failure_);
  throw CommError("{}", failure_);
}

class HostSender final : public HostLink {
 public:
  HostSender(LinkEnd end, std::unique_ptr<ByteStream> stream) : HostLink(std::move(end), std::move(stream)) {
    start();
  }
  ~HostSender() override {
    try {
      if (std::uncaught_exceptions() == 0 && !end_.board->failed()) flush();
    } catch (const std::exception&) {
      // The link ends in any case.
    }
    stop();
  }

  void send(const at::Tensor& tensor) override;
  void flush() override;
  int64_t sent_bytes() const override { return sent_bytes_; }

 private:
  void carry(const Parcel& parcel) override;

  std::atomic<int64_t> sent_bytes_ = 0;
};

void HostSender::send(const at::Tensor& tensor) {
  check("send", tensor);
  // A writer's memory is only read; the cast is for a type that both ends share.
  auto* const data = const_cast<std::byte*>(static_cast<const std::byte*>(tensor.const_data_ptr()));
  std::unique_lock lock(mutex_);
  const Parcel parcel{.tensor = tensor.detach(), .data = data, .sequence = ++sequence_};
  check_alive(lock, "send", parcel);
  parcels_.push_back(parcel);
  lock.unlock();
  changed_.notify_all();
  end_.board->note(State::kDone, {"send", parcel.sequence, end_.name}, parcel.in_words());
}

void HostSender::flush() {
  std::unique_lock lock(mutex_);
  if (parcels_.empty()) return check_alive(lock, "send", {.tensor = at::Tensor(), .sequence = sequence_});
  const Parcel last = parcels_.back();
  wait_until(lock, "send", last, [this] { return parcels_.empty(); });
}

void HostSender::carry(const Parcel& parcel) {
  const Header header{parcel.sequence, parcel.bytes(), static_cast<int64_t>(parcel.tensor.scalar_type())};
  move_all(std::as_bytes(std::span(&header, 1)), [this](auto bytes) { return stream_->write(bytes); });
  const std::span<const std::byte> payload(parcel.data, static_cast<size_t>(parcel.bytes()));
  move_all(payload, [this](auto bytes) {
    const size_t count = stream_->write(bytes);
    sent_bytes_ += static_cast<int64_t>(count);
    return count;
  });
}

class HostReceiver final : public HostLink {
 public:
  HostReceiver(LinkEnd end, std::unique_ptr<ByteStream> stream)
      : HostLink(std::move(end), std::move(stream)) {
    start();
  }
  ~HostReceiver() override { stop(); }

  void post(const at::Tensor& into) override;
  at::Tensor wait() override;
  void flush() override {
    std::unique_lock lock(mutex_);
    check_alive(lock, "recv", {.tensor = at::Tensor(), .sequence = sequence_});
  }

 private:
  void carry(const Parcel& parcel) override;
};

void HostReceiver::post(const at::Tensor& into) {
  check("recv", into);
  std::unique_lock lock(mutex_);
  const Parcel parcel{
      .tensor = into, .data = static_cast<std::byte*>(into.mutable_data_ptr()), .sequence = ++sequence_};
  check_alive(lock, "recv", parcel);
  parcels_.push_back(parcel);
  lock.unlock();
  changed_.notify_all();
}

at::Tensor HostReceiver::wait() {
  std::unique_lock lock(mutex_);
  if (parcels_.empty()) {
    throw LogicError(
        "[comm.recv] rank {} waits on link {} for a tensor that it has not posted; call post() first",
        end_.rank(), end_.name);
  }
  const Parcel parcel = parcels_.front();
  wait_until(lock, "recv", parcel, [this] { return carried_ > 0; });
  parcels_.pop_front();
  --carried_;
  return parcel.tensor;
}

void HostReceiver::carry(const Parcel& parcel) {
  Header header;
  move_all(std::as_writable_bytes(std::span(&header, 1)),
           [this](auto bytes) { return stream_->read(bytes); });
  if (header.bytes != parcel.bytes() || header.sequence != parcel.sequence) {
    throw Mismatch(fmt::format("does not fit: rank {} sent {} bytes of {} as #{}", end_.peer(), header.bytes,
                               c10::toString(static_cast<c10::ScalarType>(header.dtype)), header.sequence));
  }
  const std::span<std::byte> payload(parcel.data, static_cast<size_t>(parcel.bytes()));
  move_all(payload, [this](auto bytes) { return stream_->read(bytes); });
}

}  // namespace

std::shared_ptr<Link> make_host_link(LinkEnd end, std::unique_ptr<ByteStream> stream) {
  if (end.sends) return std::make_shared<HostSender>(std::move(end), std::move(stream));
  return std::make_shared<HostReceiver>(std::move(end), std::move(stream));
}

}  // namespace trireme::comm
