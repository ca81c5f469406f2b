#include "trireme/parallel/tensor_joint.h"

#include <ATen/core/Tensor.h>

#include <utility>

#include "trireme/nn/ring_attention.h"
#include "trireme/parallel/side_stream.h"
#include "trireme/tensor/redistribute.h"

namespace trireme::parallel {
namespace {

using plan::TensorPlacement;

class TensorJoint final : public nn::Joint {
 public:
  TensorJoint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary)
      : Joint(group->rank(), std::move(vocabulary)), group_(std::move(group)) {}

  at::Tensor gather(const at::Tensor& rows) const override {
    return tensor::redistribute(rows, TensorPlacement::shard(0), TensorPlacement::replicate(), *group_);
  }
  at::Tensor reduce_scatter(const at::Tensor& partial) const override {
    return tensor::redistribute(partial, TensorPlacement::partial(), TensorPlacement::shard(0), *group_, {},
                                tensor::Sums::kFp32);
  }

 private:
  std::shared_ptr<comm::Group> group_;
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

nn::JointPtr make_joint(const comm::Mesh& mesh, std::vector<int64_t> vocabulary) {
  if (mesh.tp->size() == 1) return nullptr;
  return make_joint(mesh.tp, std::move(vocabulary));
}

nn::JointPtr make_joint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary) {
  return std::make_shared<TensorJoint>(std::move(group), std::move(vocabulary));
}

}  // namespace trireme::parallel
