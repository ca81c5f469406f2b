// The values of a unit's parameters, seen from outside of a step: what others have written to them, what is
// loaded into them, and what is given back when the engine ends.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/flat_unit.h"

namespace trireme::parallel {
namespace {

int64_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

/// Not is_alias_of(), which asks both for their memory.
bool share_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

/// Elements [part.begin, part.end) of a buffer that begins at element `begin` of the unit.
at::Tensor slice_of(const at::Tensor& buffer, int64_t begin, const plan::Range& part) {
  return buffer.narrow(0, part.begin - begin, part.size());
}

}  // namespace

at::Tensor FlatUnit::place_of(size_t index) const {
  if (fp8_ && fp8_->is_whole(index)) return fp8_->whole_parameter(index);
  const plan::FlatEntry& entry = layout_.entries()[index];
  return place_in(full_params_, entry.offset, entry.shape);
}

bool FlatUnit::is_in_place(size_t index) const {
  const at::Tensor &leaf = params_[index].second, place = place_of(index);
  return share_storage(leaf, place) && leaf.storage_offset() == place.storage_offset() &&
         leaf.sizes() == place.sizes() && leaf.is_contiguous();
}

std::vector<HookState> FlatUnit::hook_state() const {
  std::vector<HookState> states;
  if (!compressor_) return states;
  for (const plan::FlatEntry& entry : layout_.entries()) states.push_back(compressor_->state(entry));
  return states;
}

void FlatUnit::set_hook_state(const std::vector<HookState>& params) {
  if (compressor_) compressor_->set_state(params);
}

plan::Range FlatUnit::owned_part(size_t index) const {
  const plan::FlatEntry& entry = layout_.entries()[index];
  return plan::intersect(optimizer_range(), {entry.offset, entry.end()});
}

void FlatUnit::note_write(int64_t offset) {
  const auto& entries = layout_.entries();
  const auto after = std::ranges::upper_bound(entries, offset, {}, &plan::FlatEntry::offset);
  if (after == entries.begin()) return;
  written_[static_cast<size_t>(after - entries.begin()) - 1] = true;
}

void FlatUnit::note_versions() {
  versions_.resize(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) versions_[i] = version_of(params_[i].second);
  written_.assign(params_.size(), false);
}

bool FlatUnit::has_writes() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (written_[i] || versions_[i] != version_of(params_[i].second)) return true;
  }
  return false;
}

void FlatUnit::take_writes() {
  if (!has_writes()) return;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!has_values(i) || !is_in_place(i)) continue;
    if (written_[i] || versions_[i] != version_of(params_[i].second))
      take_values(i, params_[i].second, layout_.entries()[i].offset);
  }
  note_versions();
}

void FlatUnit::take_replaced(size_t index) {
  check_replacement(index);
  at::Tensor leaf = params_[index].second;
  take_values(index, leaf, layout_.entries()[index].offset);
  leaf.set_data(place_of(index));
  nn::lend_gradient(leaf, gradients_live_ ? view_of(gradients(), index) : at::Tensor());
  versions_[index] = version_of(leaf);
}

void FlatUnit::check_replacement(size_t index) const {
  const auto& [name, leaf] = params_[index];
  const plan::FlatEntry& entry = layout_.entries()[index];
  if (leaf.scalar_type() == options_.compute && leaf.device() == full_params_.device() &&
      leaf.sizes() == at::IntArrayRef(entry.shape) && leaf.layout() == at::kStrided)
    return;
  throw LogicError(
      "[parallel.flat_unit] the memory of parameter {} was replaced by {} [{}] on {}, but the engine keeps "
      "{} [{}] on {}; call Module::to(), or torch::load() of a file in another dtype, before wrapping the "
      "module, and state::load_weights(engine, path) afterwards",
      name, c10::toString(leaf.scalar_type()), fmt::join(leaf.sizes(), ", "), leaf.device().str(),
      c10::toString(options_.compute), fmt::join(entry.shape, ", "), full_params_.device().str());
}

/// Copies `values`, elements of the unit from `first` on, to this rank's master, to what is gathered from it,
/// and to what the module sees where that has memory.
void FlatUnit::take_values(size_t index, const at::Tensor& values, int64_t first) {
  const at::NoGradGuard no_grad;
  SideStream::follow(updated_, options_.device);
  finish_unshard();
  const at::Tensor flat = values.detach().reshape({-1});
  const auto take = [&](const at::Tensor& buffer, const plan::Range& range) {
    const plan::Range part = plan::intersect(range, {first, first + flat.numel()});
    if (part.size() > 0) slice_of(buffer, range.begin, part).copy_(slice_of(flat, first, part));
  };
  if (!share_storage(flat, full_params_) && has_storage(full_params_))
    take(full_params_, {0, layout_.numel()});
  if (!share_storage(master_, full_params_)) take(master_, optimizer_range());
  if (compute_shard_.defined() && !compute_shard_.is_same(master_)) take(compute_shard_, shard_range());
  if (fp8_) {
    const plan::FlatEntry& entry = layout_.entries()[index];
    if (fp8_->is_whole(index) && !share_storage(flat, fp8_->whole_parameter(index)))
      take(fp8_->whole_parameter(index).view({-1}), {entry.offset, entry.end()});
    fp8_->expire();
    shared_.storage.free(fp8_->whole());  // bytes of other values
  }
  versions_[index] = version_of(params_[index].second);
  written_[index] = false;
}

void FlatUnit::load(size_t index, const Initializer& values) {
  const at::NoGradGuard no_grad;
  const plan::FlatEntry& entry = layout_.entries()[index];
  const bool whole = has_storage(full_params_);
  const plan::Range range = whole ? plan::Range{0, layout_.numel()} : optimizer_range();
  const plan::Range part = plan::intersect(range, {entry.offset, entry.end()});
  at::Tensor read = at::empty({part.size()}, master_.options());
  if (part.size() > 0) values(entry.name, entry.region(part), read);
  forward_slice_.reset();
  take_values(index, read, part.begin);
}

at::Tensor FlatUnit::gather(const at::Tensor& local) const {
  if (!options_.policy.shard_optimizer || groups_.shard->size() == 1) return local;
  at::Tensor full = at::empty({layout_.numel()}, local.options());
  at::Tensor place = shard_of(full);  // `local` may lie in symmetric memory, elsewhere on every rank
  place.copy_(local);
  const comm::Subject subject(*groups_.shard, name_);
  groups_.shard->all_gather(full, place);
  return full;
}

at::Tensor FlatUnit::full_master() {
  take_writes();
  SideStream::follow(updated_, options_.device);
  return gather(master_);
}

void FlatUnit::give_back(bool may_gather) {
  const at::NoGradGuard no_grad;
  take_writes();
  SideStream::follow(updated_, options_.device);
  finish_unshard();
  const bool whole_here = master_.numel() == layout_.numel();
  const bool exact_here = whole_here || (fp32_compute() && !shards_parameters());
  if (!exact_here && !may_gather && !has_storage(full_params_)) return;
  const at::Tensor values = whole_here ? master_ : exact_here || !may_gather ? full_params_ : gather(master_);
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!is_in_place(i)) continue;
    at::Tensor leaf = params_[i].second;
    leaf.mutable_grad().reset();
    leaf.set_data(view_of(values, i).to(wrapped_dtypes_[i], /*non_blocking=*/false, /*copy=*/true));
  }
  params_.clear();
}

void FlatUnit::refuse_use(const std::string& reason) {
  if (params_.empty() || has_storage(full_params_)) return;
  nn::refuse_access(full_params_, refusal(reason));
}

std::string FlatUnit::refusal(const std::string& reason) const {
  return fmt::format("[parallel.flat_unit] parameters of unit '{}' {}", name_, reason);
}

void FlatUnit::load_frozen(const Initializer& values) {
  if (!frozen_) return;
  reshard();
  frozen_->load(values);
}

const plan::FlatEntry* FlatUnit::frozen_entry(const std::string& parameter) const {
  if (!frozen_) return nullptr;
  const auto& entries = frozen_->layout().entries();
  const auto found = std::ranges::find(entries, parameter, &plan::FlatEntry::name);
  return found == entries.end() ? nullptr : &*found;
}

at::Tensor FlatUnit::frozen_value(const at::Tensor& gathered, const plan::FlatEntry& entry) const {
  return frozen_->value_of(gathered, static_cast<size_t>(&entry - frozen_->layout().entries().data()));
}

at::Tensor FlatUnit::whole_frozen() const {
  const comm::Subject subject(*groups_.shard, name_);
  return frozen_->gathered(*groups_.shard);
}

void FlatUnit::visit_frozen(
    const std::function<void(const plan::FlatEntry&, const at::Tensor&)>& body) const {
  if (!frozen_) return;
  const at::Tensor all = whole_frozen();
  const auto& entries = frozen_->layout().entries();
  for (size_t i = 0; i < entries.size(); ++i) body(entries[i], frozen_->value_of(all, i));
}

}  // namespace trireme::parallel
