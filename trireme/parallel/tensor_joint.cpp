#include "trireme/parallel/tensor_joint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <utility>

#include "trireme/nn/ring_attention.h"
#include "trireme/parallel/side_stream.h"
#include "trireme/tensor/redistribute.h"

namespace trireme::parallel {
namespace {

using plan::TensorPlacement;

/// Memory in which the other ranks of a group read what this one hands to a collective. It is used in turns,
/// by one tensor at a time. On a CPU, and where ranks send messages, there is none.
class SharedMemory {
 public:
  static constexpr size_t kPlaces = 2;  ///< products in pieces have two on their way

  explicit SharedMemory(comm::Group& group) : group_(group), shares_(!group.device().is_cpu()) {}

  /// An uninitialised tensor in a place that is free; undefined: there is none. Collective where the place
  /// grows: then the host waits.
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
    const auto place = std::ranges::find_if(places_, std::logical_not<>(), &Place::taken);
    const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
    if (!shares_ || bytes == 0 || place == places_.end()) return {};
    if (!place->memory.defined() || place->memory.numel() < bytes) grow(*place, bytes);
    if (!shares_) return {};
    place->taken = true;
    return place->memory.narrow(0, 0, bytes).view(options.dtype().toScalarType()).view(sizes);
  }
  bool has(const at::Tensor& tensor) const { return place_of(tensor) != places_.end(); }
  /// The current stream has waited for whoever reads the tensor.
  void give_back(const at::Tensor& tensor) {
    if (const auto place = place_of(tensor); place != places_.end()) place->taken = false;
  }

 private:
  struct Place {
    at::Tensor memory;
    bool taken = false;
  };
  Place* place_of(const at::Tensor& tensor) const {
    return std::ranges::find_if(places_, [&](const Place& place) {
      return place.memory.defined() && tensor.defined() && tensor.is_alias_of(place.memory);
    });
  }
  /// The place gets a power of two, since generated texts become longer token by token.
  void grow(Place& place, int64_t bytes) {
    const int64_t before = group_.symmetric_bytes();
    const uint64_t size = std::bit_ceil(static_cast<uint64_t>(bytes));
    place.memory = group_.symmetric_empty(static_cast<int64_t>(size), at::kByte);
    shares_ = group_.symmetric_bytes() > before;
    if (!shares_) place.memory.reset();
  }

  comm::Group& group_;
  bool shares_;
  mutable std::array<Place, kPlaces> places_;
};

class TensorJoint final : public nn::Joint {
 public:
  TensorJoint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary, bool beside)
      : Joint(group->rank(), std::move(vocabulary)),
        group_(std::move(group)),
        side_(group_->device(), beside && group_->size() > 1),
        gathered_(*group_),
        summed_(*group_),
        overlaps_products_(beside) {}

  nn::Arriving begin_gather(const at::Tensor& rows) const override {
    std::vector<int64_t> shape = rows.sizes().vec();
    shape.front() *= size();
    return begin(gathered_, at::empty(shape, rows.options()), rows, TensorPlacement::shard(0),
                 TensorPlacement::replicate());
  }
  nn::Arriving begin_reduce_scatter(const at::Tensor& partial, const at::Tensor& sum) const override {
    std::vector<int64_t> shape = partial.sizes().vec();
    shape.front() /= size();
    return begin(summed_, sum.defined() ? sum : at::empty(shape, partial.options().dtype(at::kFloat)),
                 partial, TensorPlacement::partial(), TensorPlacement::shard(0));
  }
  at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) const override {
    const at::Tensor place = summed_.empty(sizes, options);
    return place.defined() ? place : at::empty(sizes, options);
  }
  bool overlaps_products() const override { return overlaps_products_; }

 private:
  /// All tensors are of the current stream, which waits before it frees them or writes to them again.
  nn::Arriving begin(SharedMemory& memory, at::Tensor result, const at::Tensor& given,
                     const TensorPlacement& from, const TensorPlacement& to) const {
    at::Tensor local = given.detach();
    if (!memory.has(local)) {
      if (const at::Tensor place = memory.empty(local.sizes(), local.options()); place.defined())
        local = place.copy_(local);
    }
    const SideStream::Event done =
        side_.run([&] { tensor::redistribute_into(result, local, from, to, *group_); });
    return nn::Arriving(result, [this, &memory, done, local] {
      side_.wait(done);
      memory.give_back(local);
    });
  }

  std::shared_ptr<comm::Group> group_;
  mutable SideStream side_;
  mutable SharedMemory gathered_, summed_;
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

nn::JointPtr make_joint(const comm::Mesh& mesh, std::vector<int64_t> vocabulary, bool beside) {
  if (mesh.tp->size() == 1) return nullptr;
  return make_joint(mesh.tp, std::move(vocabulary), beside);
}

nn::JointPtr make_joint(std::shared_ptr<comm::Group> group, std::vector<int64_t> vocabulary, bool beside) {
  return std::make_shared<TensorJoint>(std::move(group), std::move(vocabulary), beside);
}

}  // namespace trireme::parallel
