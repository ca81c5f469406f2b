#include "trireme/parallel/tensor_joint.h"

#include <ATen/core/Tensor.h>

#include <utility>

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
  return make_joint(mesh.tp, std::move(vocabulary));
}

nn::JointPtr make_joint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary) {
  return std::make_shared<TensorJoint>(std::move(group), std::move(vocabulary));
}

}  // namespace trireme::parallel
