#include "trireme/parallel/flat_unit.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/heartbeat.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/recording.h"

namespace trireme::parallel {
namespace {

using Params = FrozenPart::Params;

/// Those of `params`, which are in the order of `spec`, that are frozen for good, or the others.
Params some_of(const Params& params, const plan::UnitSpec& spec, bool frozen) {
  Params some;
  for (size_t i = 0; i < params.size(); ++i)
    if (spec.params[i].frozen == frozen) some.push_back(params[i]);
  return some;
}

}  // namespace

FlatUnit::FlatUnit(const plan::UnitSpec& spec, std::vector<std::pair<std::string, at::Tensor>> params,
                   const Options& options, const plan::EngineSetting& setting, UnitGroups groups,
                   Shared& shared, const Initializer& initializer)
    : name_(spec.name),
      params_(some_of(params, spec, /*frozen=*/false)),
      options_(options),
      groups_(std::move(groups)),
      shared_(shared),
      layout_(plan::flat_layout(spec, groups_.shard->size() * groups_.replicate->size())),
      fp8_unit_(plan::fp8_unit(spec)),
      nf4_unit_(plan::nf4_unit(spec)),
      buffers_(layout_.numel(), setting, fp8_unit_, plan::frozen_layout(spec, layout_.shards()).numel(),
               nf4_unit_),
      alone_(setting.alone()),
      gathers_update_(setting.gathers_update()) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kBlock = plan::FlatLayout::kAlignment;  // moments in few bits are rounded by blocks
  for (const plan::FlatEntry& entry : layout_.entries())
    rounded_as_.push_back({xxh3(entry.name), entry.part.first_element() / kBlock * kBlock});
  compressor_ = make_compressor(options_.hook, layout_);
  if (Params frozen = some_of(params, spec, /*frozen=*/true); !frozen.empty())
    frozen_ =
        std::make_unique<FrozenPart>(plan::frozen_layout(spec, layout_.shards()), std::move(frozen), options_,
                                     come_and_go(), *groups_.shard, shared_.storage, initializer);
  if (buffers_.in_fp8)
    fp8_ = std::make_unique<Fp8Weights>(spec, layout_, shard_range(), *groups_.shard, options_);
  allocate_buffers();
  fill_master(initializer);
  if (at::Tensor copy = compute_copy(); copy.defined()) copy.copy_(master_);
  adopt();
  // Peers read gradients that stay, so all ranks must take the same pieces of memory, in the order of units.
  if (!(shared_.symmetric && keeps_gradients())) shared_.gradients().free(full_grads_);
  end_step();
  gathers_update_ ? gather_update() : reshard();
}

plan::Range FlatUnit::shard_range() const {
  const int64_t size = layout_.numel() / groups_.shard->size(), rank = groups_.shard->rank();
  return {rank * size, (rank + 1) * size};
}

plan::Range FlatUnit::optimizer_range() const {
  return options_.policy.shard_optimizer ? shard_range() : plan::Range{0, layout_.numel()};
}

at::Tensor FlatUnit::shard_of(const at::Tensor& flat) const {
  return flat.narrow(0, shard_range().begin, shard_range().size());
}

at::Tensor FlatUnit::piece_of_shard(const at::Tensor& shard) const {
  const int64_t size = layout_.shard_numel();
  return shard.narrow(0, groups_.replicate->rank() * size, size);
}

at::Tensor FlatUnit::view_of(const at::Tensor& flat, size_t index) const {
  const plan::FlatEntry& entry = layout_.entries()[index];
  return flat.narrow(0, entry.offset, entry.numel).view(entry.shape);
}

void FlatUnit::allocate_buffers() {
  const auto fp32 = at::TensorOptions().device(options_.device).dtype(at::kFloat);
  const auto compute = fp32.dtype(options_.compute);
  const plan::Range range = optimizer_range();
  const auto from_pool = [&](StoragePool& pool) {
    at::Tensor flat = without_storage(layout_.numel(), compute);
    pool.allocate(flat);
    return flat;
  };
  full_params_ = shards_parameters() ? from_pool(shared_.storage)  // every gather fills it, padding included
                                     : symmetric_zeros(layout_.numel(), options_.compute);
  full_grads_ = from_pool(shared_.gradients());
  master_ = buffers_.master_in_parameters ? full_params_.narrow(0, range.begin, range.size())
            : buffers_.master_is_shard    ? symmetric_zeros(range.size(), at::kFloat)
                                          : at::zeros({range.size()}, fp32);
  if (shards_parameters() && !fp8_) {
    compute_shard_ =
        buffers_.master_is_shard ? master_ : symmetric_zeros(shard_range().size(), options_.compute);
  }
  const bool reduced_travels = !options_.policy.shard_optimizer;
  reduced_ = buffers_.reduced_in_gradients     ? full_grads_.narrow(0, range.begin, range.size())
             : reduced_travels                 ? symmetric_zeros(range.size(), at::kFloat)
             : buffers_.reduced_comes_and_goes ? without_storage(range.size(), fp32)
                                               : at::empty({range.size()}, fp32);
  grad_squares_ = at::zeros({}, fp32.dtype(at::kDouble));
}

/// Zeros in memory that other ranks gather from.
at::Tensor FlatUnit::symmetric_zeros(int64_t count, at::ScalarType dtype) const {
  if (count == 0) return at::empty({0}, at::TensorOptions(dtype).device(options_.device));
  return groups_.shard->symmetric_empty(count, dtype).zero_();
}

void FlatUnit::fill_master(const Initializer& initializer) {
  const plan::Range range = optimizer_range();
  for (const plan::FlatEntry& entry : layout_.entries()) {
    const plan::Range part = plan::intersect(range, {entry.offset, entry.end()});
    if (part.size() == 0) continue;
    at::Tensor out = master_.narrow(0, part.begin - range.begin, part.size());
    beat();
    initializer(entry.name, entry.region(part), out);
  }
}

void FlatUnit::adopt() {
  for (size_t i = 0; i < params_.size(); ++i) {
    at::Tensor leaf = params_[i].second;
    wrapped_dtypes_.push_back(leaf.scalar_type());
    leaf.set_data(place_of(i));
    leaf.mutable_grad().reset();
    nn::lend_gradient(leaf, {});  // marks whose it is
  }
  if (fp8_) fp8_->lend(params_);
  note_versions();
}

bool FlatUnit::trainable() const {
  return std::ranges::any_of(params_, [](const auto& param) { return param.second.requires_grad(); });
}

/// What this rank sends when parameters are gathered from shards, not from the slices kept after forward.
at::Tensor FlatUnit::kept_shard(bool in_bytes) const {
  if (in_bytes) return fp8_->shard();
  return fp8_ ? master_.to(options_.compute) : compute_shard_;
}

/// Fills `whole`, in bytes of FP8 or in the dtype of computation.
void FlatUnit::gather_own(at::Tensor& whole, bool in_bytes) {
  const bool has_slice = forward_slice_.defined() && forward_slice_.scalar_type() == whole.scalar_type();
  comm::Group& group = has_slice ? *groups_.after_forward : *groups_.shard;
  const comm::Subject working_on(group, subject());
  if (fp8_) fp8_->refresh(*groups_.shard, master_);
  group.all_gather(whole, has_slice ? forward_slice_ : kept_shard(in_bytes));
}

void FlatUnit::start_unshard(Whole form) {
  const bool has_own = layout_.numel() > 0;
  if (!come_and_go() || !(has_own || frozen_) || is_whole(form)) return;
  const bool bytes = in_bytes(form);
  at::Tensor whole = bytes ? fp8_->whole() : full_params_;
  if (!bytes) nn::allow_access(full_params_);
  if (has_own) shared_.storage.allocate(whole);
  const bool gathers_frozen = frozen_ && !frozen_->is_whole();
  if (gathers_frozen) frozen_->allocate();
  const auto gather = [&] {
    if (has_own) gather_own(whole, bytes);
    if (!gathers_frozen) return;
    const comm::Subject working_on(*groups_.shard, subject());
    frozen_->gather(*groups_.shard);
  };
  unsharded_ = shared_.unshard.run(gather, updated_, unsharded_);
  unsharding_ = true;
}

/// The current stream goes on after the last update of the parameters. Where it records, after the last thing
/// that happens to them between steps, which may be that they are gathered; and only once since the update,
/// because recordings of a step are launched in the order in which they were made.
void FlatUnit::wait_for_update() {
  const bool records = is_recording(options_.device);
  if (records && std::exchange(update_recorded_, true)) return;
  SideStream::follow(records && gathers_update_ ? unsharded_ : updated_, options_.device);
}

void FlatUnit::finish_unshard() {
  if (!unsharding_ || is_recording(options_.device)) return wait_for_update();
  shared_.unshard.wait(unsharded_);
  unsharding_ = false;
}

void FlatUnit::unshard(Whole form) {
  start_unshard(form);
  finish_unshard();
  if (buffers_.reduced_comes_and_goes && !reduced_any_)
    shared_.sums.free(reduced_);  // the update that read it is over
}

void FlatUnit::reshard() {
  const bool has_bytes = fp8_ && has_storage(fp8_->whole());
  const bool has_frozen = frozen_ && frozen_->is_whole();
  if (!come_and_go() || !(has_bytes || has_storage(full_params_) || has_frozen)) return;
  finish_unshard();  // what was gathered in vain must have arrived before its memory goes
  take_writes();
  if (has_bytes) shared_.storage.free(fp8_->whole());
  constexpr const char* kReason =
      "are sharded and not gathered on this rank; hold them with parallel::DataParallel::Held while code "
      "reads their memory, and save them with state::save_weights(engine, path) instead of torch::save";
  if (has_storage(full_params_)) {
    shared_.storage.free(full_params_);
    refuse_use(kReason);
  }
  if (frozen_) frozen_->free(refusal(kReason));
  forward_slice_.reset();
}

void FlatUnit::reshard_after_forward() {
  if (!come_and_go() || options_.policy.reshard_after_forward == 1) return;
  if (groups_.after_forward && is_whole() && !forward_slice_.defined()) {
    unshard();
    const at::NoGradGuard no_grad;
    const int64_t size = layout_.numel() / groups_.after_forward->size();
    const at::Tensor& whole = has_storage(full_params_) ? full_params_ : fp8_->whole();
    at::Tensor slice = whole.narrow(0, groups_.after_forward->rank() * size, size).clone();
    reshard();
    forward_slice_ = slice;
    return;
  }
  const at::Tensor slice = forward_slice_;
  reshard();
  forward_slice_ = slice;
}

void FlatUnit::stay_in_place(const plan::EngineSetting& staying) {
  const at::NoGradGuard no_grad;
  unshard();
  if (frozen_) frozen_->stay();
  buffers_ = plan::UnitBuffers(layout_.numel(), staying, fp8_unit_, frozen_ ? frozen_->layout().numel() : 0,
                               nf4_unit_);
  gathers_update_ = staying.gathers_update();
  shared_.gradients().allocate(full_grads_);
  shared_.sums.allocate(reduced_);
  SideStream::mark(complete_, options_.device);
}

int64_t FlatUnit::bytes_to_stay() const {
  const auto missing = [](const at::Tensor& tensor) {
    return has_storage(tensor) ? 0 : tensor.numel() * static_cast<int64_t>(tensor.element_size());
  };
  return missing(full_params_) + missing(full_grads_) +
         (buffers_.reduced_in_gradients ? 0 : missing(reduced_)) + (frozen_ ? frozen_->bytes_to_gather() : 0);
}

void FlatUnit::average_parameters() {
  if (layout_.numel() == 0) return;
  const at::NoGradGuard no_grad;
  take_writes();
  SideStream::follow(updated_, options_.device);
  at::Tensor sum = at::empty({layout_.shard_numel()}, master_.options());
  const comm::Subject subject(*groups_.shard, name_);
  groups_.shard->reduce_scatter_ordered(sum, master_);
  sum.div_(static_cast<double>(groups_.shard->size()));
  groups_.shard->all_gather(master_, sum);
  if (at::Tensor copy = compute_copy(); copy.defined()) copy.copy_(master_);
}

/// The tensor that receives the updated master in the compute dtype; undefined: there is none, since the
/// master itself is used or FP8 bytes are made from it.
at::Tensor FlatUnit::compute_copy() const {
  if (fp32_compute() || fp8_) return {};
  const plan::Range range = optimizer_range();
  return shards_parameters() ? compute_shard_ : full_params_.narrow(0, range.begin, range.size());
}

optim::FlatParam FlatUnit::optimizer_param(const GroupRule& rule) const {
  return {master_, reduced_, compute_copy(), segments(rule)};
}

std::vector<optim::Segment> FlatUnit::segments(const GroupRule& rule) const {
  const plan::Range range = optimizer_range();
  std::vector<optim::Segment> segments;
  for (size_t i = 0; i < params_.size(); ++i) {
    const plan::FlatEntry& entry = layout_.entries()[i];
    const plan::Range part = plan::intersect(range, {entry.offset, entry.end()});
    if (part.size() == 0 || !params_[i].second.requires_grad()) continue;
    const optim::Group group = rule           ? rule(entry.name, entry.shape)
                               : entry.decays ? optim::Group{}
                                              : optim::Group{.decay_factor = 0.0};
    segments.push_back({.range = {part.begin - range.begin, part.end - range.begin},
                        .group = group,
                        .key = rounded_as_[i].key,
                        .first = rounded_as_[i].first + part.begin - entry.offset});
  }
  return segments;
}

void FlatUnit::round_as(size_t index, const std::string& name, int64_t first) {
  rounded_as_.at(index) = {xxh3(name), first};
}

void FlatUnit::end_step(const SideStream::Event& updated) {
  reduced_any_ = false;
  if (compressor_) compressor_->commit();
  updated_ = updated;
  update_recorded_ = false;
  if (fp8_) fp8_->expire();
}

void FlatUnit::gather_update() {
  if (layout_.numel() == 0 && frozen_) return;
  const auto gather = [this] {
    const comm::Subject subject(*groups_.shard, name_);
    groups_.shard->all_gather(full_params_, shards_parameters() ? kept_shard(false) : shard_of(full_params_));
  };
  unsharded_ = shared_.unshard.run(gather, updated_, unsharded_);
  unsharding_ = true;
}

plan::StateBytes FlatUnit::state_bytes() const {
  const auto bytes = [](const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); };
  const auto params = [&] {
    if (fp8_) return fp8_->bytes();
    if (!shards_parameters()) return bytes(full_params_);
    return bytes(compute_shard_) + (come_and_go() ? 0 : bytes(full_params_));
  };
  return {.parameters = params() + (frozen_ ? frozen_->bytes() : 0),
          .gradients = (has_storage(full_grads_) ? bytes(full_grads_) : 0) +
                       (reduced_.is_alias_of(full_grads_) ? 0 : bytes(reduced_)),
          .optimizer = buffers_.master_in_parameters || buffers_.master_is_shard ? 0 : bytes(master_)};
}

}  // namespace trireme::parallel
