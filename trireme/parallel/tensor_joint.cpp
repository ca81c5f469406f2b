#include "trireme/parallel/tensor_joint.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <utility>

#include "trireme/tensor/redistribute.h"

namespace trireme::parallel {
namespace {

using plan::TensorPlacement;

/// On a GPU all collectives of a joint run on a stream of its own, each after what the current stream held
/// when it was asked for. So memory that a result leaves on that stream is not taken again before those who
/// read it are done.
class TensorJoint final : public nn::Joint {
 public:
  TensorJoint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary)
      : Joint(group->rank(), std::move(vocabulary)), group_(std::move(group)) {
    const c10::Device device = group_->device();
    if (!device.is_cpu())
      stream_ =
          c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }

  nn::Arriving start_gather(const at::Tensor& rows) const override {
    return start(rows, [&] {
      return tensor::redistribute(rows, TensorPlacement::shard(0), TensorPlacement::replicate(), *group_);
    });
  }
  nn::Arriving start_reduce_scatter(const at::Tensor& partial) const override {
    return start(partial, [&] {
      return tensor::redistribute(partial, TensorPlacement::partial(), TensorPlacement::shard(0), *group_, {},
                                  tensor::Sums::kFp32);
    });
  }

 private:
  template <typename Collective>
  nn::Arriving start(const at::Tensor& sent, const Collective& collective) const {
    if (!stream_) return collective();
    const c10::Device device = group_->device();
    c10::Event asked(device.type());
    asked.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    asked.block(*stream_);
    const c10::StreamGuard guard(*stream_);
    at::Tensor received = collective();
    auto arrived = std::make_shared<c10::Event>(device.type());
    arrived->record(*stream_);
    return {std::move(received), sent, std::move(arrived)};
  }

  std::shared_ptr<comm::Group> group_;
  std::optional<c10::Stream> stream_;
};

class ExchangedContext final : public nn::Context {
 public:
  explicit ExchangedContext(std::shared_ptr<comm::Group> group)
      : Context(group->rank(), group->size()), group_(std::move(group)) {}

  at::Tensor exchange_tokens(const at::Tensor& x) const override {
    return tensor::redistribute(x, kByToken, kByRank, group_).squeeze(2);
  }
  at::Tensor exchange_heads(const at::Tensor& x) const override {
    return tensor::redistribute(x.unsqueeze(2), kByRank, kByToken, group_);
  }

 private:
  static constexpr plan::Placed kByToken = {TensorPlacement::shard(1), TensorPlacement::shard(1)},
                                kByRank = {TensorPlacement::shard(2), TensorPlacement::shard(2)};

  std::shared_ptr<comm::Group> group_;
};

}  // namespace

nn::ContextPtr make_context(const comm::Mesh& mesh) {
  if (mesh.cp->size() == 1) return nullptr;
  return std::make_shared<ExchangedContext>(mesh.cp);
}

nn::JointPtr make_joint(const comm::Mesh& mesh, std::vector<int64_t> vocabulary) {
  if (mesh.tp->size() == 1) return nullptr;
  return std::make_shared<TensorJoint>(mesh.tp, std::move(vocabulary));
}

}  // namespace trireme::parallel
