// Links between GPUs over NCCL: a communicator and a stream for each direction, so that a receive that waits
// holds up neither computation nor the other direction.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <deque>
#include <exception>
#include <utility>

#include "trireme/comm/gpu_link.h"
#include "trireme/comm/group.h"

namespace trireme::comm {
namespace {

constexpr int64_t kSender = 0, kReceiver = 1;  // group ranks

class GpuLink final : public Link {
 public:
  GpuLink(LinkEnd end, std::shared_ptr<Group> pair)
      : end_(std::move(end)),
        pair_(std::move(pair)),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, end_.device.index())) {}
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

  template <typename Enqueue>
  void enqueue(const at::Tensor& tensor, const Enqueue& body);
  void drop_sent();

  LinkEnd end_;
  std::deque<Parcel> parcels_;   ///< what has not left yet, or was posted and not waited for
  std::shared_ptr<Group> pair_;  ///< behind them: it ends what still uses them
  c10::cuda::CUDAStream stream_;
  at::cuda::CUDAEvent before_;
  at::cuda::CUDAEvent last_;  ///< behind what was sent, or waited for, last
};

GpuLink::~GpuLink() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    last_.synchronize();  // the tensors may be freed only now; the group's watch ends what waits in vain
  } catch (const std::exception&) {
    // The device has failed, and the next call that uses it throws.
  }
}

/// body() enqueues on the link's stream, behind what the current stream holds now.
template <typename Enqueue>
void GpuLink::enqueue(const at::Tensor& tensor, const Enqueue& body) {
  const c10::cuda::CUDAGuard device(end_.device);
  before_.record(c10::cuda::getCurrentCUDAStream(end_.device.index()));
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
  if (!end_.sends) end_.throw_other_end("send");
  drop_sent();
  enqueue(tensor.detach(), [&] { pair_->send(tensor, kReceiver); });
  last_.record(stream_);
}

void GpuLink::post(const at::Tensor& into) {
  if (end_.sends) end_.throw_other_end("recv");
  enqueue(into, [&] {
    at::Tensor to = into;
    pair_->recv(to, kSender);
  });
}

at::Tensor GpuLink::wait() {
  if (end_.sends) end_.throw_other_end("recv");
  if (parcels_.empty()) end_.throw_nothing_posted();
  pair_->check();
  last_ = std::move(parcels_.front().moved);
  last_.block(c10::cuda::getCurrentCUDAStream(end_.device.index()));
  at::Tensor arrived = std::move(parcels_.front().tensor);
  parcels_.pop_front();
  return arrived;
}

void GpuLink::flush() {
  last_.synchronize();
  pair_->check();
  if (end_.sends) drop_sent();
}

int64_t GpuLink::sent_bytes() const {
  const auto& traffic = pair_->traffic();
  const auto sends = traffic.find(plan::Collective::kSend);
  return sends == traffic.end() ? 0 : sends->second.bytes;
}

}  // namespace

std::shared_ptr<Link> make_gpu_link(LinkEnd end, std::shared_ptr<Group> pair) {
  return std::make_shared<GpuLink>(std::move(end), std::move(pair));
}

}  // namespace trireme::comm
