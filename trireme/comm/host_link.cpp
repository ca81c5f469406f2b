#include "trireme/comm/host_link.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/comm/cause.h"
#include "trireme/comm/checks.h"
#include "trireme/comm/peer_news.h"
#include "trireme/comm/progress_board.h"

namespace trireme::comm {
namespace {

using State = ProgressBoard::State;
using Clock = std::chrono::steady_clock;

/// How often an end that waits checks that the other process runs.
constexpr auto kLookAround = std::chrono::milliseconds(100);

/// What travels ahead of a tensor's bytes.
struct Header {
  int64_t sequence = 0;
  int64_t bytes = 0;
  int64_t dtype = 0;
};

/// The two ends disagree about a tensor.
class Mismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace

std::string tensor_in_words(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return fmt::format("{} bytes of {} ({})", tensor.nbytes(), c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "));
}

void LinkEnd::check(const char* operation, const at::Tensor& tensor) const {
  check_tensor({operation, name, 2, device}, "tensor", tensor);
}

void LinkEnd::throw_other_end(const char* operation) const {
  throw LogicError("[comm.{}] rank {} is the {} of link {}; call it on rank {}", operation, rank(),
                   sends ? "sender" : "receiver", name, peer());
}

void LinkEnd::throw_nothing_posted() const {
  throw LogicError(
      "[comm.recv] rank {} waits on link {} for a tensor for which it has not called post(); call post() "
      "first",
      rank(), name);
}

std::string LinkEnd::report(const Operation& operation, const std::string& subject, const std::string& what,
                            double waited_s, const std::string& advice) const {
  const ProgressBoard::Report others = board->report_failure(operation, {from, to}, subject);
  return fmt::format("[comm.{}] {} {} on rank {} after {:.1f} s (deadline {:g} s): {}; {}", operation.name,
                     in_words(operation, subject), what, rank(), waited_s, timeout_s, others.text, advice);
}

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
    if (failure_.empty()) {
      lost_ = cause_of(error);
      mismatch_ = dynamic_cast<const Mismatch*>(&error) != nullptr;
    }
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

HostLink::Parcel HostLink::enqueue(const char* operation, const at::Tensor& tensor, std::byte* data) {
  std::unique_lock lock(mutex_);
  Parcel parcel{.tensor = tensor, .data = data, .sequence = sequence_ + 1};
  check_alive(lock, operation, parcel);
  ++sequence_;
  if (end_.sends) sent_bytes_ += parcel.bytes();
  parcels_.push_back(parcel);
  changed_.notify_all();
  return parcel;
}

/// move() moves some bytes and returns how many.
template <typename Bytes, typename Move>
void HostLink::move_all(Bytes bytes, const Move& move) {
  std::string lost;
  while (!bytes.empty()) {
    if (stopping_) throw std::runtime_error("it was closed on this rank");
    const size_t count = move(bytes);
    bytes = bytes.subspan(count);
    if (count > 0) {
      last_moved_ = monotonic_seconds();
      lost.clear();
      continue;
    }
    // Bytes that a process wrote before it died are still read, but none are left.
    if (!lost.empty()) throw std::runtime_error(lost);
    const auto before = Clock::now();
    stream_->wait(kLookAround);
    const bool quiet = Clock::now() - before >= kLookAround / 2;
    if (quiet) lost = end_.news->about({end_.peer()});
  }
}

void HostLink::read_all(std::span<std::byte> bytes) {
  move_all(bytes, [this](std::span<std::byte> part) { return stream_->read(part); });
}

void HostLink::write_all(std::span<const std::byte> bytes) {
  move_all(bytes, [this](std::span<const std::byte> part) { return stream_->write(part); });
}

void HostLink::throw_mismatch(int64_t sequence, int64_t bytes, int64_t dtype) const {
  throw Mismatch(fmt::format("does not match: rank {} {} {} bytes of {} as #{}", end_.peer(),
                             end_.sends ? "expects" : "sent", bytes,
                             c10::toString(static_cast<c10::ScalarType>(dtype)), sequence));
}

void HostLink::wait_until(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel,
                          const std::function<bool()>& done) {
  const double started = monotonic_seconds();
  end_.board->note(State::kInside, {operation, parcel.sequence, end_.name}, parcel.in_words());
  while (!done()) {
    const double now = monotonic_seconds(), idle_s = now - std::max(started, last_moved_.load());
    const bool lost = !lost_.empty() || !failure_.empty();
    if (lost || idle_s >= end_.timeout_s) fail(lock, operation, parcel, now - started);
    changed_.wait_for(lock, std::chrono::duration<double>(end_.timeout_s - idle_s));
  }
  end_.board->note(State::kDone, {operation, parcel.sequence, end_.name}, parcel.in_words());
}

void HostLink::wait_until_carried() {
  const char* const operation = end_.sends ? "send" : "recv";
  std::unique_lock lock(mutex_);
  const Parcel last = parcels_.empty() ? Parcel{.tensor = {}, .sequence = sequence_} : parcels_.back();
  check_alive(lock, operation, last);
  if (end_.sends && !parcels_.empty()) wait_until(lock, operation, last, [this] { return parcels_.empty(); });
}

void HostLink::flush() {
  wait_until_carried();
}

void HostLink::check_alive(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel) {
  if (!lost_.empty() || !failure_.empty()) fail(lock, operation, parcel, 0.0);
}

/// Closes the link, so that the other end need not wait for its deadline.
void HostLink::fail(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel,
                    double waited_s) {
  if (failure_.empty()) {
    const bool mismatch = mismatch_;
    const std::string what = lost_.empty() ? fmt::format("gave up waiting for rank {}", end_.peer())
                             : mismatch    ? lost_
                                           : fmt::format("lost rank {}: {}", end_.peer(), lost_);
    lock.unlock();
    stream_->close();
    const std::string text =
        end_.report({operation, parcel.sequence, end_.name}, parcel.in_words(), what, waited_s,
                    mismatch ? "both ends must send and receive tensors of the same sizes in the same order"
                             : kLookAtThatRank);
    lock.lock();
    failure_ = text;
    mismatch_ = mismatch;  // whatever the thread met when the stream closed
  }
  if (mismatch_) throw LogicError("{}", failure_);
  throw CommError("{}", failure_);
}

namespace {

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

 private:
  void carry(const Parcel& parcel) override;
};

void HostSender::send(const at::Tensor& tensor) {
  end_.check("send", tensor);
  // A sender's memory is only read; the cast is for a type that both ends share.
  auto* const data = const_cast<std::byte*>(static_cast<const std::byte*>(tensor.const_data_ptr()));
  const Parcel parcel = enqueue("send", tensor.detach(), data);
  end_.board->note(State::kDone, {"send", parcel.sequence, end_.name}, parcel.in_words());
}

void HostSender::carry(const Parcel& parcel) {
  const Header header{parcel.sequence, parcel.bytes(), static_cast<int64_t>(parcel.tensor.scalar_type())};
  write_all(std::as_bytes(std::span(&header, 1)));
  write_all({parcel.data, static_cast<size_t>(parcel.bytes())});
}

class HostReceiver final : public HostLink {
 public:
  HostReceiver(LinkEnd end, std::unique_ptr<ByteStream> stream)
      : HostLink(std::move(end), std::move(stream)) {
    start();
  }
  ~HostReceiver() override { stop(); }

  void post(const at::Tensor& into) override {
    end_.check("recv", into);
    enqueue("recv", into, static_cast<std::byte*>(into.mutable_data_ptr()));
  }
  at::Tensor wait() override;

 private:
  void carry(const Parcel& parcel) override;
};

at::Tensor HostReceiver::wait() {
  std::unique_lock lock(mutex_);
  if (parcels_.empty()) end_.throw_nothing_posted();
  const Parcel parcel = parcels_.front();
  wait_until(lock, "recv", parcel, [this] { return carried_ > 0; });
  parcels_.pop_front();
  --carried_;
  return parcel.tensor;
}

void HostReceiver::carry(const Parcel& parcel) {
  Header header;
  read_all(std::as_writable_bytes(std::span(&header, 1)));
  if (header.bytes != parcel.bytes() || header.sequence != parcel.sequence) {
    throw_mismatch(header.sequence, header.bytes, header.dtype);
  }
  read_all({parcel.data, static_cast<size_t>(parcel.bytes())});
}

}  // namespace

std::shared_ptr<Link> make_host_link(LinkEnd end, std::unique_ptr<ByteStream> stream) {
  if (end.sends) return std::make_shared<HostSender>(std::move(end), std::move(stream));
  return std::make_shared<HostReceiver>(std::move(end), std::move(stream));
}

}  // namespace trireme::comm
