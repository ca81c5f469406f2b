#include "trireme/parallel/frozen_part.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"
#include "trireme/base/nf4_format.h"
#include "trireme/kernels/nf4.h"
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

/// The blocks of `count` elements from element `first` of bytes that begin with a block.
at::Tensor blocks_in(const at::Tensor& bytes, int64_t first, int64_t count) {
  const int64_t blocks = (count + kNf4Block - 1) / kNf4Block;
  return place_in(bytes, nf4_bytes(first), {blocks, kNf4Bytes});
}

}  // namespace

FrozenPart::FrozenPart(plan::FlatLayout layout, Params params, const Options& options, bool comes_and_goes,
                       comm::Group& group, StoragePool& pool, const Initializer& initializer)
    : layout_(std::move(layout)), params_(std::move(params)), pool_(pool), comes_and_goes_(comes_and_goes) {
  const at::NoGradGuard no_grad;
  const auto compute = at::TensorOptions().device(options.device).dtype(options.compute);
  int64_t rest = 0;
  for (const plan::FlatEntry& entry : layout_.entries()) {
    places_.push_back(rest);
    rest += entry.nf4 ? 0 : entry.numel;
  }
  if (std::ranges::any_of(layout_.entries(), &plan::FlatEntry::nf4)) {
    rest_ = at::empty({rest}, compute);
    hollow_ = without_storage(layout_.numel(), compute);
  }
  const at::ScalarType dtype = in_nf4() ? at::kByte : options.compute;
  range_ = {0, layout_.numel()};
  if (options.policy.shard_parameters && group.size() > 1) {
    const int64_t size = layout_.numel() / group.size();
    range_ = {group.rank() * size, (group.rank() + 1) * size};
    whole_ = without_storage(kept_of(layout_.numel()), compute.dtype(dtype));
    shard_ = group.symmetric_empty(kept_of(size), dtype).zero_();
  } else {
    whole_ = at::zeros({kept_of(layout_.numel())}, compute.dtype(dtype));
  }
  load(initializer);
  adopt();
}

/// Data that are set anew are lent to nobody.
FrozenPart::~FrozenPart() {
  if (!in_nf4()) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i)
    if (layout_.entries()[i].nf4) params_[i].second.set_data(place_of(i));
}

/// Elements of whole_ that stand for so many of the layout, which are whole blocks where these are kept.
int64_t FrozenPart::kept_of(int64_t elements) const {
  return in_nf4() ? nf4_bytes(elements) : elements;
}

at::Tensor FrozenPart::whole_rest(size_t index) const {
  const plan::FlatEntry& entry = layout_.entries()[index];
  return rest_.narrow(0, places_[index], entry.numel).view(entry.shape);
}

at::Tensor FrozenPart::place_of(size_t index) const {
  const plan::FlatEntry& entry = layout_.entries()[index];
  if (in_nf4() && !entry.nf4) return whole_rest(index);
  return place_in(in_nf4() ? hollow_ : whole_, entry.offset, entry.shape);
}

void FrozenPart::adopt() {
  for (size_t i = 0; i < params_.size(); ++i) {
    at::Tensor leaf = params_[i].second;
    const plan::FlatEntry& entry = layout_.entries()[i];
    leaf.set_requires_grad(false);
    leaf.mutable_grad().reset();
    leaf.set_data(place_of(i));
    if (entry.nf4) nn::lend_nf4(leaf, blocks_in(whole_, entry.offset, entry.numel));
  }
  if (in_nf4())
    nn::refuse_access(
        hollow_,
        "[parallel.frozen_part] weights are held in NF4 (adapter.base), and linear layers alone "
        "read them; ask DataParallel::Weights for their values");
}

void FrozenPart::load(const Initializer& values) {
  const at::NoGradGuard no_grad;
  TRIREME_CHECK(!shard_.defined() || !is_whole(),
                "[parallel.frozen_part] frozen parameters are gathered, and would not see other values; load "
                "them before "
                "the first step");
  in_nf4() ? load_blocks(values) : fill(shard_.defined() ? shard_ : whole_, range_, layout_, values);
}

/// Values are encoded as they come, without rounding to the dtype of computation.
void FrozenPart::load_blocks(const Initializer& values) {
  const at::Tensor& kept = shard_.defined() ? shard_ : whole_;
  for (size_t i = 0; i < layout_.entries().size(); ++i) {
    const plan::FlatEntry& entry = layout_.entries()[i];
    const plan::Range all{entry.offset, entry.end()}, part = entry.nf4 ? plan::intersect(range_, all) : all;
    if (part.size() == 0) continue;
    beat();
    const at::Tensor exact = at::empty({part.size()}, rest_.options().dtype(at::kFloat));
    at::Tensor out = exact;
    values(entry.name, entry.region(part), out);
    if (!entry.nf4) {
      whole_rest(i).copy_(exact.view(entry.shape));
      continue;
    }
    at::Tensor blocks = blocks_in(kept, part.begin - range_.begin, part.size());
    kernels::nf4_encode(blocks, exact);
  }
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
  at::Tensor all = whole_;
  if (shard_.defined()) {
    all = at::empty(whole_.sizes(), shard_.options());
    group.all_gather(all, shard_);
  }
  return all;
}

at::Tensor FrozenPart::value_of(const at::Tensor& gathered, size_t index) const {
  const plan::FlatEntry& entry = layout_.entries()[index];
  if (!in_nf4()) return gathered.narrow(0, entry.offset, entry.numel).view(entry.shape);
  if (!entry.nf4) return whole_rest(index);
  at::Tensor values = at::empty({entry.numel}, rest_.options());
  kernels::nf4_decode(values, blocks_in(gathered, entry.offset, entry.numel));
  return values.view(entry.shape);
}

int64_t FrozenPart::bytes() const {
  const auto bytes_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.numel() * static_cast<int64_t>(tensor.element_size()) : 0;
  };
  return (comes_and_goes_ ? 0 : bytes_of(whole_)) + bytes_of(shard_) + bytes_of(rest_);
}

int64_t FrozenPart::bytes_to_gather() const {
  return is_whole() ? 0 : whole_.numel() * static_cast<int64_t>(whole_.element_size());
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
