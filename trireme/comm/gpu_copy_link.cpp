// Links between GPUs of one host by copy engines, which leave the multiprocessors to computation. When the
// receiver's stream has come to post(), a host function tells the sender's process where the tensor lies. The
// sender's thread then enqueues a copy into it, and behind the copy a write of the tensor's number to a word
// of host memory, for which the receiver's stream waits. So the only thing on a GPU that waits for another
// process is the stream that called wait(), and the host can end that by writing the word.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/hex.h"
#include "trireme/comm/cause.h"
#include "trireme/comm/device_watch.h"
#include "trireme/comm/gpu_link.h"
#include "trireme/comm/own_stream.h"
#include "trireme/comm/peer_news.h"
#include "trireme/comm/progress_board.h"
#include "trireme/comm/shared_word.h"

namespace trireme::comm {
namespace {

using c10::cuda::CUDACachingAllocator::getIpcDevPtr;
using c10::cuda::CUDACachingAllocator::shareIpcHandle;
using State = ProgressBoard::State;

constexpr auto kPollEvery = std::chrono::microseconds(10);
constexpr auto kReleaseAgain = std::chrono::milliseconds(20);
constexpr double kAskAfterPeer_s = 0.1;
/// How long after the loss of a peer a tensor may still arrive: the peer may have enqueued its copy before.
constexpr double kLateArrival_s = 1.0;

void check(cudaError_t error, const char* call) {
  TRIREME_CHECK(error == cudaSuccess, "[comm.link] {}: {}", call, cudaGetErrorString(error));
}

/// Where a posted tensor lies in the memory whose handle follows.
struct Place {
  int64_t sequence = 0;
  int64_t bytes = 0;
  int64_t dtype = 0;
  int64_t offset = 0;
  int64_t handle_bytes = 0;
};

/// Notes the tensor's offset; returns the handle of its memory.
std::string share(const at::Tensor& tensor, Place& place) {
  void* const memory = tensor.storage().mutable_data();
  try {
    const auto shared = shareIpcHandle(memory);
    place.offset = shared.offset +
                   (static_cast<std::byte*>(tensor.mutable_data_ptr()) - static_cast<std::byte*>(memory));
    return shared.handle;
  } catch (const std::exception& error) {
    throw LogicError(
        "[comm.recv] the memory of the posted tensor cannot be shared ({}); post a tensor allocated by "
        "torch's allocator",
        cause_of(error));
  }
}

class CopySender final : public HostLink {
 public:
  /// `peer` is some memory of the receiver: while it is mapped the GPUs stay connected.
  CopySender(LinkEnd end, std::unique_ptr<ByteStream> places, std::unique_ptr<SharedWord> arrived,
             std::shared_ptr<void> peer)
      : HostLink(std::move(end), std::move(places)),
        arrived_(std::move(arrived)),
        peer_(std::move(peer)),
        copies_(end_.device) {
    start();
  }
  ~CopySender() override;

  void send(const at::Tensor& tensor) override;
  void settle() override { wait_until_carried(); }
  void flush() override;

 private:
  struct Leaving {
    at::Tensor tensor;
    at::cuda::CUDAEvent left;
  };

  void carry(const Parcel& parcel) override;
  void* map(const std::string& handle, int64_t offset);
  void drop_left();

  std::unique_ptr<SharedWord> arrived_;
  std::shared_ptr<void> peer_;
  OwnStream copies_;
  std::deque<at::cuda::CUDAEvent> ready_;                ///< of the parcels that were not carried
  std::deque<Leaving> leaving_;                          ///< carried, and perhaps not copied yet
  std::map<std::string, std::shared_ptr<void>> mapped_;  ///< the receiver's memory, by handle
};

CopySender::~CopySender() {
  try {
    if (std::uncaught_exceptions() == 0 && !end_.board->failed()) flush();
  } catch (const std::exception&) {
    // The link ends in any case.
  }
  stop();
  try {
    copies_.get().synchronize();  // nothing holds up its copies but the computation before them
  } catch (const std::exception&) {
    // The device has failed, and the next call that uses it throws.
  }
}

void CopySender::drop_left() {
  const std::lock_guard lock(mutex_);
  while (!leaving_.empty() && leaving_.front().left.query()) leaving_.pop_front();
}

void CopySender::send(const at::Tensor& tensor) {
  end_.check("send", tensor);
  drop_left();
  at::cuda::CUDAEvent ready;
  ready.record(c10::cuda::getCurrentCUDAStream(end_.device.index()));
  {
    const std::lock_guard lock(mutex_);
    ready_.push_back(std::move(ready));
  }
  auto* const data = const_cast<std::byte*>(static_cast<const std::byte*>(tensor.const_data_ptr()));
  const Parcel parcel = enqueue("send", tensor.detach(), data);
  end_.board->note(State::kDone, {"send", parcel.sequence, end_.name}, parcel.in_words());
}

void CopySender::flush() {
  wait_until_carried();
  copies_.get().synchronize();
  drop_left();
}

void* CopySender::map(const std::string& handle, int64_t offset) {
  std::shared_ptr<void>& memory = mapped_[handle];
  if (!memory) memory = getIpcDevPtr(handle);
  return static_cast<std::byte*>(memory.get()) + offset;
}

void CopySender::carry(const Parcel& parcel) {
  Place place;
  read_all(std::as_writable_bytes(std::span(&place, 1)));
  std::string handle(static_cast<size_t>(place.handle_bytes), '\0');
  read_all(std::as_writable_bytes(std::span(handle)));
  if (place.bytes != parcel.bytes() || place.sequence != parcel.sequence) {
    throw_mismatch(place.sequence, place.bytes, place.dtype);
  }
  const c10::cuda::CUDAGuard device(end_.device);
  // The host may be capturing a graph on another thread.
  const c10::cuda::CUDAStreamCaptureModeGuard capture_mode(cudaStreamCaptureModeThreadLocal);
  Leaving leaving{.tensor = parcel.tensor, .left = {}};
  {
    const std::lock_guard lock(mutex_);
    ready_.front().block(copies_.get());
    ready_.pop_front();
  }
  if (parcel.bytes() > 0) {
    check(cudaMemcpyAsync(map(handle, place.offset), parcel.data, static_cast<size_t>(parcel.bytes()),
                          cudaMemcpyDeviceToDevice, copies_.get()),
          "cudaMemcpyAsync");
  }
  arrived_->write(static_cast<uint32_t>(parcel.sequence), copies_.get().stream());
  leaving.left.record(copies_.get());
  const std::lock_guard lock(mutex_);
  leaving_.push_back(std::move(leaving));
}

class CopyReceiver final : public Link {
 public:
  CopyReceiver(LinkEnd end, std::shared_ptr<ByteStream> places, std::unique_ptr<SharedWord> arrived)
      : end_(std::move(end)), places_(std::move(places)), arrived_(std::move(arrived)), stream_(end_.device) {
    watch_ = std::make_unique<DeviceWatch>(
        watched_gpu(end_.device), end_.timeout_s, [this] { return end_.news->about({end_.peer()}); },
        [this](const Operation& operation, double elapsed_s, const std::string& reason) {
          abort(operation, elapsed_s, reason);
        });
  }
  CopyReceiver(const CopyReceiver&) = delete;
  CopyReceiver& operator=(const CopyReceiver&) = delete;
  ~CopyReceiver() override;

  void send(const at::Tensor&) override { end_.throw_other_end("send"); }
  void post(const at::Tensor& into) override;
  at::Tensor wait() override;
  void flush() override;
  int64_t sent_bytes() const override { return 0; }

 private:
  struct Announcement {
    std::shared_ptr<ByteStream> places;
    std::string text;
  };
  static void announce(void* announcement);
  void abort(const Operation& operation, double elapsed_s, const std::string& reason);
  void check_alive();
  void wait_on_host(const Operation& operation);

  LinkEnd end_;
  std::shared_ptr<ByteStream> places_;
  std::unique_ptr<SharedWord> arrived_;
  OwnStream stream_;
  at::cuda::CUDAEvent before_, waited_;
  std::deque<at::Tensor> posted_;  ///< and not arrived
  int64_t posts_ = 0, waits_ = 0;
  std::mutex failure_mutex_;
  std::map<int64_t, std::string> subjects_;  ///< of what the GPU may still wait for, by number
  std::string failure_;
  std::atomic<bool> failed_ = false, ending_ = false;
  std::unique_ptr<DeviceWatch> watch_;  ///< last, so that its thread ends before what it uses
};

/// For as long as this process lives. The sender may have enqueued a copy to a posted tensor behind hours of
/// computation before it learns that nobody waits for it.
void keep_for_good(const std::deque<at::Tensor>& posted) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<at::Tensor>;
  const std::lock_guard lock(mutex);
  kept.insert(kept.end(), posted.begin(), posted.end());
}

CopyReceiver::~CopyReceiver() {
  if (!posted_.empty() || failed_) places_->close();  // nobody is to write there any more
  keep_for_good(posted_);
  try {
    // Host functions and waits use what is destroyed here; the watch ends waits in vain.
    stream_.get().synchronize();
    waited_.synchronize();
  } catch (const std::exception&) {
    // The device has failed, and the next call that uses it throws.
  }
  ending_ = true;
  watch_.reset();
  places_->close();
}

/// A host function of the stream: it may neither throw nor call CUDA.
void CopyReceiver::announce(void* announcement) {
  const std::unique_ptr<Announcement> owned(static_cast<Announcement*>(announcement));
  try {
    std::span<const std::byte> bytes = std::as_bytes(std::span(owned->text));
    while (!bytes.empty()) {
      const size_t count = owned->places->write(bytes);
      bytes = bytes.subspan(count);
      if (count == 0) owned->places->wait(std::chrono::milliseconds(100));
    }
  } catch (const std::exception&) {
    // The sender has gone; the watch tells whoever waits for its tensor.
  }
}

void CopyReceiver::post(const at::Tensor& into) {
  end_.check("recv", into);
  check_alive();
  const c10::cuda::CUDAGuard device(end_.device);
  Place place{.sequence = posts_ + 1,
              .bytes = static_cast<int64_t>(into.nbytes()),
              .dtype = static_cast<int64_t>(into.scalar_type())};
  const std::string handle = place.bytes > 0 ? share(into, place) : "";
  place.handle_bytes = static_cast<int64_t>(handle.size());
  auto announcement = std::make_unique<Announcement>();
  announcement->places = places_;
  announcement->text = std::string(reinterpret_cast<const char*>(&place), sizeof place) + handle;
  before_.record(c10::cuda::getCurrentCUDAStream(end_.device.index()));
  before_.block(stream_.get());
  check(cudaLaunchHostFunc(stream_.get(), &CopyReceiver::announce, announcement.get()), "cudaLaunchHostFunc");
  static_cast<void>(announcement.release());
  ++posts_;
  posted_.push_back(into);
}

at::Tensor CopyReceiver::wait() {
  if (posted_.empty()) end_.throw_nothing_posted();
  check_alive();
  const c10::cuda::CUDAGuard device(end_.device);
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(end_.device.index());
  const Operation operation{"recv", ++waits_, end_.name};
  at::Tensor arriving = posted_.front();
  const std::string subject = tensor_in_words(arriving);
  {
    const std::lock_guard lock(failure_mutex_);
    constexpr int64_t kRemembered = 1024;
    subjects_[waits_] = subject;
    subjects_.erase(waits_ - kRemembered);
  }
  end_.board->note(State::kInside, operation, subject);
  wait_on_host(operation);
  posted_.pop_front();
  arrived_->wait_for(static_cast<uint32_t>(waits_), current.stream());
  watch_->enqueued(operation);
  waited_.record(current);
  end_.board->note(State::kDone, operation, subject);
  return arriving;
}

/// The host waits for the tensor, so that nothing on this GPU waits for the other process for long. While
/// CUDA loads a kernel, maps memory or has no room for another launch, it waits for the work on the GPU and
/// keeps other threads out: if that work waits for the other process, and the other process does the same,
/// neither goes on. The word wraps around; numbers that were waited for are less than half a turn behind.
void CopyReceiver::wait_on_host(const Operation& operation) {
  const double started = monotonic_seconds();
  double asked = started;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  double lost_at = kNever;
  const auto give_up = [&](double now, const std::string& what) {
    const std::string& subject = subjects_.at(operation.sequence);
    const std::string text = end_.report(operation, subject, what, now - started, kLookAtThatRank);
    {
      const std::lock_guard lock(failure_mutex_);
      failure_ = text;
    }
    failed_ = true;
    throw CommError("{}", text);
  };
  while (static_cast<int32_t>(arrived_->value() - static_cast<uint32_t>(operation.sequence)) < 0) {
    check_alive();
    const double now = monotonic_seconds();
    if (now - started > end_.timeout_s) give_up(now, fmt::format("gave up waiting for rank {}", end_.peer()));
    if (now - asked > kAskAfterPeer_s) {
      asked = now;
      const std::string lost = end_.news->about({end_.peer()});
      lost_at = lost.empty() ? kNever : std::min(lost_at, now);
      if (now - lost_at >= kLateArrival_s) give_up(now, "lost a peer: " + lost);
    }
    std::this_thread::sleep_for(kPollEvery);
  }
}

void CopyReceiver::flush() {
  waited_.synchronize();
  check_alive();
}

void CopyReceiver::check_alive() {
  if (!failed_) return;
  const std::lock_guard lock(failure_mutex_);
  throw CommError("{}", failure_);
}

/// Called by the watch's thread: records why the tensor has not come, and lets the streams go that wait.
void CopyReceiver::abort(const Operation& operation, double elapsed_s, const std::string& reason) {
  std::string subject;
  {
    const std::lock_guard lock(failure_mutex_);
    const auto found = subjects_.find(operation.sequence);
    if (found != subjects_.end()) subject = found->second;
  }
  const std::string what = reason.empty() ? fmt::format("gave up waiting for rank {}", end_.peer()) : reason;
  const std::string text = end_.report(operation, subject, what, elapsed_s, kLookAtThatRank);
  {
    const std::lock_guard lock(failure_mutex_);
    failure_ = text;
  }
  failed_ = true;
  // A copy of the sender that is late may write the word again.
  while (!ending_) {
    arrived_->write_from_host(static_cast<uint32_t>(operation.sequence) + (uint32_t{1} << 30));
    std::this_thread::sleep_for(kReleaseAgain);
  }
}

/// The memory of offer_probe(), mapped here; none when that cannot be.
std::shared_ptr<void> map_probe(const std::string& offer, c10::Device device) {
  std::istringstream words(offer);
  pid_t pid = 0;
  std::string hex;
  // A process cannot map its own memory a second time.
  if (!(words >> pid >> hex) || pid == ::getpid()) return {};
  const std::optional<std::string> handle = from_hex(hex);
  if (!handle) return {};
  try {
    const c10::cuda::CUDAGuard guard(device);
    return getIpcDevPtr(*handle);
  } catch (const std::exception&) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
}

/// "pid handle" of some memory of this process's allocator; empty when it cannot be shared.
std::string offer_probe(const at::Tensor& probe) {
  try {
    const std::string handle = shareIpcHandle(probe.storage().mutable_data()).handle;
    return fmt::format("{} {}", ::getpid(), to_hex(handle.data(), handle.size()));
  } catch (const std::exception&) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
}

/// Sends a text to the other end and returns the one that it sent.
using Exchange = std::function<std::string(const std::string& mine)>;

/// Whether it works at both ends.
bool works_for_both(bool works, const Exchange& exchange) {
  constexpr const char* kYes = "yes";
  return exchange(works ? kYes : "") == kYes && works;
}

/// The sender reads where tensors lie, so it makes the stream.
std::shared_ptr<Link> make_sender(const LinkEnd& end, const Exchange& exchange) {
  const std::unique_ptr<StreamOffer> places = offer_memory_stream();
  const std::string offer = exchange(places ? places->text() : "");
  const size_t line = offer.find('\n');
  auto word = line == std::string::npos ? nullptr : SharedWord::open(offer.substr(0, line));
  std::shared_ptr<void> peer = word ? map_probe(offer.substr(line + 1), end.device) : nullptr;
  if (!works_for_both(places && word && peer, exchange)) return nullptr;
  return std::make_shared<CopySender>(end, places->accept(end.timeout_s), std::move(word), std::move(peer));
}

/// The receiver makes the word, and offers the probe, which lives until the sender has tried to map it.
std::shared_ptr<Link> make_receiver(const LinkEnd& end, const Exchange& exchange, const at::Tensor& probe) {
  auto word = SharedWord::make();
  const std::string offered = word ? word->text() + "\n" + offer_probe(probe) : "";
  std::shared_ptr<ByteStream> places = open_memory_stream(exchange(offered));
  if (!works_for_both(places && word, exchange)) return nullptr;
  return std::make_shared<CopyReceiver>(end, std::move(places), std::move(word));
}

}  // namespace

std::shared_ptr<Link> make_gpu_copy_link(
    const LinkEnd& end, const std::function<std::string(const std::string& mine)>& exchange) {
  const c10::cuda::CUDAGuard guard(end.device);
  const at::Tensor probe = at::empty({1}, at::TensorOptions(end.device));
  return end.sends ? make_sender(end, exchange) : make_receiver(end, exchange, probe);
}

}  // namespace trireme::comm
