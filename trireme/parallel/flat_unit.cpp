#include "trireme/parallel/flat_unit.h"

#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/kernels/optimizer.h"
#include "trireme/parallel/storage.h"

namespace trireme::parallel {
namespace {

std::vector<plan::ParamSpec> specs_of(const std::vector<std::pair<std::string, at::Tensor>>& params) {
  std::vector<plan::ParamSpec> specs;
  for (const auto& [name, tensor] : params) specs.push_back({name, tensor.sizes().vec()});
  return specs;
}

}  // namespace

FlatUnit::FlatUnit(std::string name, const std::vector<std::pair<std::string, at::Tensor>>& params,
                   const FlatOptions& options, std::shared_ptr<comm::Group> group,
                   const Initializer& initializer)
    : name_(std::move(name)),
      options_(options),
      group_(std::move(group)),
      layout_(specs_of(params), group_->size()) {
  const at::NoGradGuard no_grad;
  allocate_buffers();
  fill_master(initializer);
  if (at::Tensor copy = optimizer_param().copy; copy.defined()) copy.copy_(master_);
  adopt(params);
  free_storage(full_grads_);
  publish_update();
}

plan::Range FlatUnit::optimizer_range() const {
  return options_.policy.shard_optimizer ? layout_.shard(group_->rank()) : plan::Range{0, layout_.numel()};
}

at::Tensor FlatUnit::shard_of(const at::Tensor& flat) const {
  return flat.narrow(0, layout_.shard(group_->rank()).begin, layout_.shard_numel());
}

void FlatUnit::allocate_buffers() {
  const auto fp32 = at::TensorOptions().device(options_.device).dtype(at::kFloat);
  const auto compute = fp32.dtype(options_.compute);
  const plan::Range range = optimizer_range();
  full_params_ = at::zeros({layout_.numel()}, compute);
  full_grads_ = at::empty({layout_.numel()}, compute);
  const bool master_in_place = fp32_compute() && !shards_parameters();
  master_ =
      master_in_place ? full_params_.narrow(0, range.begin, range.size()) : at::zeros({range.size()}, fp32);
  if (shards_parameters()) {
    compute_shard_ = fp32_compute() ? master_ : at::zeros({layout_.shard_numel()}, compute);
  }
  const bool reduced_in_place = fp32_compute() && !options_.policy.shard_gradients;
  reduced_ =
      reduced_in_place ? full_grads_.narrow(0, range.begin, range.size()) : at::empty({range.size()}, fp32);
}

void FlatUnit::fill_master(const Initializer& initializer) {
  const plan::Range range = optimizer_range();
  std::vector<float> values;
  for (const plan::FlatEntry& entry : layout_.entries()) {
    const plan::Range part = plan::intersect(range, {entry.offset, entry.end()});
    if (part.size() == 0) continue;
    values.resize(static_cast<size_t>(part.size()));
    initializer(entry.name, part.begin - entry.offset, values);
    master_.narrow(0, part.begin - range.begin, part.size())
        .copy_(at::from_blob(values.data(), {part.size()}));
  }
}

void FlatUnit::adopt(const std::vector<std::pair<std::string, at::Tensor>>& params) {
  for (size_t i = 0; i < params.size(); ++i) {
    const plan::FlatEntry& entry = layout_.entries()[i];
    at::Tensor leaf = params[i].second;
    TRIREME_CHECK(leaf.is_leaf(), "[parallel.flat_unit] parameter {} is not a leaf tensor", entry.name);
    leaf.set_data(full_params_.narrow(0, entry.offset, entry.numel).view(entry.shape));
    if (leaf.requires_grad())
      leaf.mutable_grad() = full_grads_.narrow(0, entry.offset, entry.numel).view(entry.shape);
  }
}

void FlatUnit::gather_parameters() {
  if (has_storage(full_params_)) return;
  allocate_storage(full_params_);
  group_->all_gather(full_params_, compute_shard_);
}

void FlatUnit::release_parameters() {
  if (shards_parameters()) free_storage(full_params_);
}

void FlatUnit::prepare_gradients() {
  if (gradients_pending_) return;
  allocate_storage(full_grads_);
  full_grads_.zero_();
  gradients_pending_ = true;
}

at::Tensor FlatUnit::reduced_shard() const {
  return options_.policy.shard_optimizer ? reduced_ : shard_of(reduced_);
}

void FlatUnit::reduce_gradients(bool last_micro_batch) {
  if (!gradients_pending_ || (fp32_compute() && !last_micro_batch)) return;
  const at::Tensor wire = full_grads_.to(options_.reduce);
  at::Tensor shard = reduced_shard();
  if (reduced_any_) {
    at::Tensor sum = at::empty_like(shard);
    group_->reduce_scatter_ordered(sum, wire);
    shard.add_(sum);
  } else {
    group_->reduce_scatter_ordered(shard, wire);
  }
  reduced_any_ = true;
  gradients_pending_ = false;
  if (options_.policy.shard_gradients) free_storage(full_grads_);
  if (last_micro_batch && !options_.policy.shard_optimizer) group_->all_gather(reduced_, shard);
}

double FlatUnit::shard_grad_squares() const {
  const at::Tensor shard = reduced_shard();
  if (shard.is_cuda()) return shard.to(at::kDouble).square().sum().item<double>();
  return kernels::sum_of_squares(shard.data_ptr<float>(), shard.numel());
}

optim::FlatParam FlatUnit::optimizer_param() const {
  optim::FlatParam param{master_, reduced_, {}, {}};
  const plan::Range range = optimizer_range();
  if (!fp32_compute()) {
    param.copy = shards_parameters() ? compute_shard_ : full_params_.narrow(0, range.begin, range.size());
  }
  for (const plan::FlatEntry& entry : layout_.entries()) {
    const plan::Range part = plan::intersect(range, {entry.offset, entry.end()});
    if (part.size() == 0) continue;
    param.segments.push_back({{part.begin - range.begin, part.end - range.begin}, entry.shape.size() >= 2});
  }
  return param;
}

void FlatUnit::publish_update() {
  reduced_any_ = false;
  if (shards_parameters()) {
    free_storage(full_params_);
  } else if (options_.policy.shard_optimizer) {
    group_->all_gather(full_params_, shard_of(full_params_));
  }
}

at::Tensor FlatUnit::full_master() const {
  if (!options_.policy.shard_optimizer || group_->size() == 1) return master_;
  at::Tensor full = at::empty({layout_.numel()}, master_.options());
  group_->all_gather(full, master_);
  return full;
}

}  // namespace trireme::parallel
