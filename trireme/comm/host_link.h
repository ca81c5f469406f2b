#pragma once
// Links that a thread of the host serves, so that tensors travel while the host computes, and a sender is
// never held up by a receiver that is late. Internal to this room.
#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "trireme/comm/byte_stream.h"
#include "trireme/comm/link.h"
#include "trireme/comm/operation.h"

namespace trireme::comm {

class PeerNews;
class ProgressBoard;

/// "4096 bytes of BFloat16 (2, 1024)"; empty for an undefined one.
std::string tensor_in_words(const at::Tensor& tensor);

/// One end of a link: whose it is, and what it says when something is wrong.
struct LinkEnd {
  std::string name;  ///< "0->1"
  int64_t from = 0, to = 0;
  bool sends = false;
  c10::Device device = c10::kCPU;
  double timeout_s = 0.0;
  std::shared_ptr<ProgressBoard> board;
  std::shared_ptr<PeerNews> news;

  int64_t rank() const { return sends ? from : to; }
  int64_t peer() const { return sends ? to : from; }

  /// Throws LogicError for a tensor that cannot travel.
  void check(const char* operation, const at::Tensor& tensor) const;
  [[noreturn]] void throw_other_end(const char* operation) const;
  [[noreturn]] void throw_nothing_posted() const;
  /// Publishes the failure and returns the message about it. Takes up to 2 s.
  std::string report(const Operation& operation, const std::string& subject, const std::string& what,
                     double waited_s, const std::string& advice) const;
};

inline constexpr const char* kLookAtThatRank =
    "look at the log of that rank, and raise the timeout if it is only slow";

/// What both ends share: a queue of tensors, the thread that carries them, and how both fail. Ends override
/// the calls that are theirs.
class HostLink : public Link {
 public:
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;

  void send(const at::Tensor&) override { end_.throw_other_end("send"); }
  void post(const at::Tensor&) override { end_.throw_other_end("recv"); }
  at::Tensor wait() override { end_.throw_other_end("recv"); }
  void flush() override;
  int64_t sent_bytes() const override { return sent_bytes_; }

 protected:
  /// A tensor on its way, or the place of one.
  struct Parcel {
    at::Tensor tensor;
    std::byte* data = nullptr;
    int64_t sequence = 0;

    int64_t bytes() const { return static_cast<int64_t>(tensor.nbytes()); }
    std::string in_words() const { return tensor_in_words(tensor); }
  };

  HostLink(LinkEnd end, std::unique_ptr<ByteStream> stream)
      : end_(std::move(end)), stream_(std::move(stream)) {}

  /// Constructors of ends call start() last, their destructors stop() first: the thread calls functions that
  /// they override.
  void start() {
    thread_ = std::thread([this] { run(); });
  }
  void stop();

  /// Numbers the tensor and leaves it to the thread. Throws when the link is lost.
  Parcel enqueue(const char* operation, const at::Tensor& tensor, std::byte* data);
  /// Waits until `done`; throws when the link is lost or nothing has moved within the deadline. `parcel` is
  /// what it waits for.
  void wait_until(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel,
                  const std::function<bool()>& done);
  /// A sender waits until the thread has carried everything; any end throws when the link is lost.
  void wait_until_carried();

  /// Moves the next parcel, on the thread, without `mutex_`. What it throws ends the link.
  virtual void carry(const Parcel& parcel) = 0;
  /// For carry(): they wait as long as the link lives and the other process runs.
  void read_all(std::span<std::byte> bytes);
  void write_all(std::span<const std::byte> bytes);
  /// For carry(): the other end has a tensor that is not the parcel's equal.
  [[noreturn]] void throw_mismatch(int64_t sequence, int64_t bytes, int64_t dtype) const;

  LinkEnd end_;
  std::unique_ptr<ByteStream> stream_;
  std::mutex mutex_;
  std::deque<Parcel>
      parcels_;         ///< senders drop those that were carried, receivers those that were waited for
  size_t carried_ = 0;  ///< of those kept

 private:
  void run();
  template <typename Bytes, typename Move>
  void move_all(Bytes bytes, const Move& move);
  void check_alive(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel);
  [[noreturn]] void fail(std::unique_lock<std::mutex>& lock, const char* operation, const Parcel& parcel,
                         double waited_s);

  std::condition_variable changed_;
  int64_t sequence_ = 0;
  std::atomic<int64_t> sent_bytes_ = 0;
  std::atomic<double> last_moved_ = 0.0;
  std::atomic<bool> stopping_ = false;
  std::string lost_;  ///< why the thread has ended
  bool mismatch_ = false;
  std::string failure_;  ///< what was thrown
  std::thread thread_;
};

/// For ranks on CPUs: the tensors' bytes go through `stream`.
std::shared_ptr<Link> make_host_link(LinkEnd end, std::unique_ptr<ByteStream> stream);

}  // namespace trireme::comm
