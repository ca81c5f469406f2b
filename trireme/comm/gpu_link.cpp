// Links between GPUs over NCCL: a communicator for each direction, whose kernels torch enqueues on a stream
// that it took from its pool for that communicator, so that a receive that waits holds up neither computation
// nor, up to 32 communicators in a process, the other direction. A receive is a kernel that occupies its GPU
// until the tensor has come, so it is enqueued only when somebody waits for it, and the host waits, too: what
// computes goes on until then, and CUDA is not asked for anything meanwhile.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <deque>
#include <exception>
#include <thread>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/comm/cause.h"
#include "trireme/comm/gpu_link.h"
#include "trireme/comm/group.h"
#include "trireme/comm/own_stream.h"
#include "trireme/comm/pair_groups.h"

namespace trireme::comm {
namespace {

constexpr auto kAskEvery = std::chrono::microseconds(10);
constexpr int64_t kSender = 0, kReceiver = 1;  // group ranks

class GpuLink final : public Link {
 public:
  GpuLink(LinkEnd end, std::shared_ptr<Group> pair, std::shared_ptr<PairGroups> pairs)
      : end_(std::move(end)), pairs_(std::move(pairs)), pair_(std::move(pair)), stream_(end_.device) {
    connect();
  }
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

  void connect();
  template <typename Enqueue>
  void enqueue(const at::Tensor& tensor, const Enqueue& body);
  void drop_sent();
  void wait_on_host();
  int64_t bytes_of_group() const;

  LinkEnd end_;
  std::deque<Parcel> parcels_;     ///< what has not left yet
  std::deque<at::Tensor> posted_;  ///< and not waited for
  std::shared_ptr<PairGroups> pairs_;
  std::shared_ptr<Group> pair_;  ///< behind the tensors: it ends what still uses them
  OwnStream stream_;
  at::cuda::CUDAEvent before_;
  at::cuda::CUDAEvent last_;  ///< behind what was sent, or waited for, last
  std::string subject_;       ///< of the last operation
  int64_t operations_ = 0, connecting_bytes_ = 0;
};

GpuLink::~GpuLink() {
  bool can_go_on = std::uncaught_exceptions() == 0 && posted_.empty();
  try {
    if (std::uncaught_exceptions() == 0) last_.synchronize();  // the group's watch ends what waits in vain
    pair_->check();
  } catch (const std::exception&) {
    can_go_on = false;  // this may be known to the caller already; else the next use of the device throws
  }
  pairs_->give_back(pair_, can_go_on);
}

/// The first message between two ranks makes NCCL connect them, for which it waits on the host for the other:
/// two ranks that both sent first, on links of their own, would wait for each other.
void GpuLink::connect() {
  at::Tensor probe = at::zeros({1}, at::TensorOptions(end_.device).dtype(at::kByte));
  enqueue(probe, [&] { end_.sends ? pair_->send(probe, kReceiver) : pair_->recv(probe, kSender); });
  last_.record(stream_.get());
  wait_on_host();
  parcels_.clear();
  connecting_bytes_ = bytes_of_group();
}

/// body() enqueues on the link's stream, behind what the current stream holds now.
template <typename Enqueue>
void GpuLink::enqueue(const at::Tensor& tensor, const Enqueue& body) {
  const c10::cuda::CUDAGuard device(end_.device);
  before_.record(c10::cuda::getCurrentCUDAStream(end_.device.index()));
  before_.block(stream_.get());
  const c10::cuda::CUDAStreamGuard stream(stream_.get());
  subject_ = tensor_in_words(tensor);
  ++operations_;
  const Subject named(*pair_, subject_);
  body();
  Parcel& parcel = parcels_.emplace_back();
  parcel.tensor = tensor;
  parcel.moved.record(stream_.get());
}

void GpuLink::drop_sent() {
  while (!parcels_.empty() && parcels_.front().moved.query()) parcels_.pop_front();
}

void GpuLink::send(const at::Tensor& tensor) {
  if (!end_.sends) end_.throw_other_end("send");
  drop_sent();
  enqueue(tensor.detach(), [&] { pair_->send(tensor, kReceiver); });
  last_.record(stream_.get());
}

void GpuLink::post(const at::Tensor& into) {
  if (end_.sends) end_.throw_other_end("recv");
  pair_->check();
  end_.check("recv", into);
  posted_.push_back(into);
}

at::Tensor GpuLink::wait() {
  if (end_.sends) end_.throw_other_end("recv");
  if (posted_.empty()) end_.throw_nothing_posted();
  at::Tensor arriving = std::move(posted_.front());
  posted_.pop_front();
  enqueue(arriving, [&] { pair_->recv(arriving, kSender); });
  last_ = std::move(parcels_.back().moved);
  parcels_.pop_back();
  wait_on_host();
  last_.block(c10::cuda::getCurrentCUDAStream(end_.device.index()));
  return arriving;
}

void GpuLink::wait_on_host() {
  while (!last_.query()) {
    pair_->check();
    std::this_thread::sleep_for(kAskEvery);
  }
  pair_->check();
}

void GpuLink::flush() {
  try {
    last_.synchronize();
  } catch (const std::exception& error) {
    pair_->check();
    // A GPU that writes to the memory of a process that has died fails for good.
    const Operation operation{end_.sends ? "send" : "recv", operations_, end_.name};
    const std::string what = fmt::format("failed on its device ({})", cause_of(error));
    throw CommError("{}", end_.report(operation, subject_, what, 0.0, kLookAtThatRank));
  }
  pair_->check();
  if (end_.sends) drop_sent();
}

int64_t GpuLink::sent_bytes() const {
  return bytes_of_group() - connecting_bytes_;
}

int64_t GpuLink::bytes_of_group() const {
  const auto& traffic = pair_->traffic();
  const auto sends = traffic.find(plan::Collective::kSend);
  return sends == traffic.end() ? 0 : sends->second.bytes;
}

}  // namespace

std::shared_ptr<Link> make_gpu_link(LinkEnd end, std::shared_ptr<Group> pair,
                                    std::shared_ptr<PairGroups> pairs) {
  return std::make_shared<GpuLink>(std::move(end), std::move(pair), std::move(pairs));
}

}  // namespace trireme::comm
