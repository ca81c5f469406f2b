// Links between GPUs over NCCL: a communicator and a stream for each direction, so that a receive that waits
// holds up neither computation nor the other direction.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <deque>
#include <exception>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/comm/gpu_link.h"
#include "trireme/comm/group.h"

namespace trireme::comm {
namespace {

constexpr int64_t kSender = 0, kReceiver = 1;  // group ranks

class GpuLink final : public Link {
 public:
  explicit GpuLink(std::shared_ptr<Group> pair)
      : pair_(std::move(pair)),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, pair_->device().index())) {}
  GpuLink(const GpuLink&) = delete;
  GpuLink& operator=(const GpuLink&) = delete;
  ~GpuLink() override;

  void send(const at::Tensor& tensor) override;
  void post(const at::Tensor& into) override;
  at::Tensor wait() override;
  void flush() override;
  int64_t sent_bytes() const override;

 private:
  struct Parcel {
    at::Tensor tensor;
    at::cuda::CUDAEvent moved;  ///< recorded behind its operation
  };

  void check_end(const char* operation, int64_t wanted) const;
  template <typename Enqueue>
  void enqueue(const at::Tensor& tensor, const Enqueue& body);
  void drop_sent();

  std::deque<Parcel> parcels_;   ///< what has not left yet, or was posted and not waited for
  std::shared_ptr<Group> pair_;  ///< behind them: it ends what still uses them
  c10::cuda::CUDAStream stream_;
  at::cuda::CUDAEvent before_;
};

GpuLink::~GpuLink() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    stream_.synchronize();  // the tensors may be freed only now; the group's watch ends what waits in vain
  } catch (const std::exception&) {
    // The device has failed, and the next call that uses it throws.
  }
}

void GpuLink::check_end(const char* operation, int64_t wanted) const {
  if (pair_->rank() == wanted) return;
  const auto peer = static_cast<size_t>(1 - pair_->rank());
  throw LogicError("[comm.{}] rank {} is the {} of link {}; call it on rank {}", operation,
                   pair_->ranks()[1 - peer], pair_->rank() == kSender ? "sender" : "receiver", pair_->name(),
                   pair_->ranks()[peer]);
}

/// body() enqueues on the link's stream, behind what the current stream holds now.
template <typename Enqueue>
void GpuLink::enqueue(const at::Tensor& tensor, const Enqueue& body) {
  const c10::cuda::CUDAGuard device(pair_->device());
  before_.record(c10::cuda::getCurrentCUDAStream(pair_->device().index()));
  before_.block(stream_);
  const c10::cuda::CUDAStreamGuard stream(stream_);
  const std::string subject = tensor_in_words(tensor);
  const Subject named(*pair_, subject);
  body();
  Parcel& parcel = parcels_.emplace_back();
  parcel.tensor = tensor;
  parcel.moved.record(stream_);
}

void GpuLink::drop_sent() {
  while (!parcels_.empty() && parcels_.front().moved.query()) parcels_.pop_front();
}

void GpuLink::send(const at::Tensor& tensor) {
  check_end("send", kSender);
  drop_sent();
  enqueue(tensor.detach(), [&] { pair_->send(tensor, kReceiver); });
}

void GpuLink::post(const at::Tensor& into) {
  check_end("recv", kReceiver);
  enqueue(into, [&] {
    at::Tensor to = into;
    pair_->recv(to, kSender);
  });
}

at::Tensor GpuLink::wait() {
  check_end("recv", kReceiver);
  if (parcels_.empty()) {
    throw LogicError(
        "[comm.recv] rank {} waits on link {} for a tensor that it has not posted; call post() first",
        pair_->ranks()[kReceiver], pair_->name());
  }
  pair_->check();
  parcels_.front().moved.block(c10::cuda::getCurrentCUDAStream(pair_->device().index()));
  at::Tensor arrived = std::move(parcels_.front().tensor);
  parcels_.pop_front();
  return arrived;
}

void GpuLink::flush() {
  stream_.synchronize();
  pair_->check();
  drop_sent();
}

int64_t GpuLink::sent_bytes() const {
  const auto& traffic = pair_->traffic();
  const auto sends = traffic.find(plan::Collective::kSend);
  return sends == traffic.end() ? 0 : sends->second.bytes;
}

}  // namespace

std::shared_ptr<Link> make_gpu_link(std::shared_ptr<Group> pair) {
  return std::make_shared<GpuLink>(std::move(pair));
}

}  // namespace trireme::comm
