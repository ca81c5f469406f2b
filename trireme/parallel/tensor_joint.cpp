#include "trireme/parallel/tensor_joint.h"

#include <ATen/ATen.h>

#include <bit>
#include <cstdint>
#include <utility>

#include "trireme/nn/ring_attention.h"
#include "trireme/parallel/side_stream.h"
#include "trireme/tensor/redistribute.h"

namespace trireme::parallel {
namespace {

using plan::TensorPlacement;

/// Memory in which the other ranks of a group read what this one hands to a collective. On a CPU, and where
/// ranks send messages, tensors are handed over where they are.
class SharedMemory {
 public:
  explicit SharedMemory(comm::Group& group) : group_(group), shares_(!group.device().is_cpu()) {}

  /// A copy of the tensor there, on the current stream, which must be that of all collectives that read it;
  /// else the tensor. Collective where the memory grows: then the host waits.
  at::Tensor copy_of(const at::Tensor& tensor) {
    if (!shares_ || tensor.nbytes() == 0) return tensor;
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (!memory_.defined() || memory_.numel() < bytes) grow(bytes);
    if (!shares_) return tensor;
    return memory_.narrow(0, 0, bytes).view(tensor.scalar_type()).view(tensor.sizes()).copy_(tensor);
  }

 private:
  /// To a power of two, since generated texts become longer token by token.
  void grow(int64_t bytes) {
    const int64_t before = group_.symmetric_bytes();
    memory_ =
        group_.symmetric_empty(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes))), at::kByte);
    shares_ = group_.symmetric_bytes() > before;
    if (!shares_) memory_.reset();
  }

  comm::Group& group_;
  bool shares_;
  at::Tensor memory_;
};

class TensorJoint final : public nn::Joint {
 public:
  TensorJoint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary,
              const JointOverlap& overlap)
      : Joint(group->rank(), std::move(vocabulary)),
        group_(std::move(group)),
        side_(group_->device(), overlap.beside && group_->size() > 1),
        shared_(*group_),
        overlaps_products_(overlap.products) {}

  nn::Arriving begin_gather(const at::Tensor& rows) const override {
    std::vector<int64_t> shape = rows.sizes().vec();
    shape.front() *= size();
    return begin(at::empty(shape, rows.options()), rows, TensorPlacement::shard(0),
                 TensorPlacement::replicate());
  }
  nn::Arriving begin_reduce_scatter(const at::Tensor& partial, const at::Tensor& sum) const override {
    std::vector<int64_t> shape = partial.sizes().vec();
    shape.front() /= size();
    return begin(sum.defined() ? sum : at::empty(shape, partial.options().dtype(at::kFloat)), partial,
                 TensorPlacement::partial(), TensorPlacement::shard(0));
  }
  bool overlaps_products() const override { return overlaps_products_; }

 private:
  /// Both tensors are of the current stream, which waits before it frees them.
  nn::Arriving begin(const at::Tensor& result, const at::Tensor& local, const TensorPlacement& from,
                     const TensorPlacement& to) const {
    const SideStream::Event done = side_.run([&] {
      at::Tensor written = result;
      tensor::redistribute_into(written, shared_.copy_of(local.detach()), from, to, *group_);
    });
    return nn::Arriving(result, [this, done, local] { side_.wait(done); });
  }

  std::shared_ptr<comm::Group> group_;
  mutable SideStream side_;
  mutable SharedMemory shared_;  ///< used by side_ alone, one collective after the other
  bool overlaps_products_;
};

class ExchangedContext final : public nn::UlyssesContext {
 public:
  ExchangedContext(std::shared_ptr<comm::Group> group, const plan::TokenSplit& tokens)
      : UlyssesContext(tokens), group_(std::move(group)) {}

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

class GroupRing final : public nn::RingContext {
 public:
  GroupRing(std::shared_ptr<comm::Group> group, const plan::TokenSplit& tokens, bool overlap)
      : RingContext(tokens), group_(std::move(group)), side_(group_->device(), overlap) {}

  Arrival pass_on(const at::Tensor& mine, at::Tensor& theirs) const override {
    const SideStream::Event done = side_.run([&] { exchange(mine, theirs); });
    return [this, done] { side_.wait(done); };
  }

 private:
  void exchange(const at::Tensor& mine, at::Tensor& theirs) const {
    const comm::Subject subject(*group_, "keys and values of ring attention");
    const int64_t ranks = group_->size(), rank = group_->rank();
    group_->send_recv(mine, (rank + 1) % ranks, theirs, (rank + ranks - 1) % ranks);
  }

  std::shared_ptr<comm::Group> group_;
  mutable SideStream side_;
};

}  // namespace

nn::ContextPtr make_context(const comm::Mesh& mesh, const plan::TokenSplit& tokens, bool overlap) {
  if (mesh.cp->size() == 1) return nullptr;
  if (tokens.zigzag) return std::make_shared<GroupRing>(mesh.cp, tokens, overlap);
  return std::make_shared<ExchangedContext>(mesh.cp, tokens);
}

nn::JointPtr make_joint(const comm::Mesh& mesh, std::vector<int64_t> vocabulary,
                        const JointOverlap& overlap) {
  if (mesh.tp->size() == 1) return nullptr;
  return make_joint(mesh.tp, std::move(vocabulary), overlap);
}

nn::JointPtr make_joint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary,
                        const JointOverlap& overlap) {
  return std::make_shared<TensorJoint>(std::move(group), std::move(vocabulary), overlap);
}

}  // namespace trireme::parallel
