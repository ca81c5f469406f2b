#include "trireme/parallel/frozen_part.h"

#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::parallel {
namespace {

/// Initial values are made in fp32 and rounded, as those of parameters that have masters are.
void fill(at::Tensor values, const plan::Range& range, const plan::FlatLayout& layout,
          const Initializer& initializer) {
  for (const plan::FlatEntry& entry : layout.entries()) {
    const plan::Range part = plan::intersect(range, {entry.offset, entry.end()});
    if (part.size() == 0) continue;
    beat();
    at::Tensor place = values.narrow(0, part.begin - range.begin, part.size());
    at::Tensor exact = place.scalar_type() == at::kFloat
                           ? place
                           : at::empty({part.size()}, place.options().dtype(at::kFloat));
    initializer(entry.name, entry.region(part), exact);
    if (!exact.is_same(place)) place.copy_(exact);
  }
}

}  // namespace

FrozenPart::FrozenPart(plan::FlatLayout layout, Params params, const Options& options, bool comes_and_goes,
                       comm::Group& group, StoragePool& pool, const Initializer& initializer)
    : layout_(std::move(layout)), params_(std::move(params)), pool_(pool), comes_and_goes_(comes_and_goes) {
  const at::NoGradGuard no_grad;
  const auto compute = at::TensorOptions().device(options.device).dtype(options.compute);
  if (options.policy.shard_parameters && group.size() > 1) {
    const int64_t size = layout_.numel() / group.size();
    first_ = group.rank() * size;
    whole_ = without_storage(layout_.numel(), compute);
    shard_ = group.symmetric_empty(size, options.compute).zero_();
  } else {
    whole_ = at::zeros({layout_.numel()}, compute);
  }
  load(initializer);
  for (size_t i = 0; i < params_.size(); ++i) {
    at::Tensor leaf = params_[i].second;
    const plan::FlatEntry& entry = layout_.entries()[i];
    leaf.set_requires_grad(false);
    leaf.mutable_grad().reset();
    leaf.set_data(place_in(whole_, entry.offset, entry.shape));
  }
}

void FrozenPart::load(const Initializer& values) {
  const at::NoGradGuard no_grad;
  TRIREME_CHECK(!shard_.defined() || !is_whole(),
                "[parallel.frozen_part] frozen parameters are gathered, and would not see other values; load "
                "them before "
                "the first step");
  const at::Tensor& kept = shard_.defined() ? shard_ : whole_;
  fill(kept, {first_, first_ + kept.numel()}, layout_, values);
}

void FrozenPart::allocate() {
  nn::allow_access(whole_);
  pool_.allocate(whole_);
}

void FrozenPart::gather(comm::Group& group) {
  group.all_gather(whole_, shard_);
}

void FrozenPart::free(const std::string& reason) {
  if (!comes_and_goes_ || !is_whole()) return;
  pool_.free(whole_);
  nn::refuse_access(whole_, reason);
}

at::Tensor FrozenPart::gathered(comm::Group& group) const {
  if (!shard_.defined()) return whole_;
  at::Tensor all = at::empty({layout_.numel()}, shard_.options());
  group.all_gather(all, shard_);
  return all;
}

int64_t FrozenPart::bytes() const {
  const int64_t whole = comes_and_goes_ ? 0 : layout_.numel() * static_cast<int64_t>(whole_.element_size());
  return whole + (shard_.defined() ? static_cast<int64_t>(shard_.nbytes()) : 0);
}

int64_t FrozenPart::bytes_to_gather() const {
  return is_whole() ? 0 : layout_.numel() * static_cast<int64_t>(whole_.element_size());
}

void FrozenPart::check() const {
  for (const auto& [name, leaf] : params_) {
    TRIREME_CHECK(
        !leaf.requires_grad(),
        "[parallel.frozen_part] parameter {} is frozen for good and has no memory for a gradient, but "
        "requires_grad is true; set it to false, or do not declare the parameter frozen",
        name);
  }
}

}  // namespace trireme::parallel
