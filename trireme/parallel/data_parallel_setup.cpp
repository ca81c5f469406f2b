// How an engine is put together: groups, pools, units, and who tells it what is used.
#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <ranges>

#include "trireme/base/error.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/parallel/module_parameters.h"

namespace trireme::parallel {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// The parameters of `unit`, each taken out of `left`.
NamedTensors take_params(const plan::UnitSpec& unit, std::map<std::string, at::Tensor>& left) {
  NamedTensors params;
  for (const plan::ParamSpec& spec : unit.params) {
    const auto found = left.find(spec.name);
    TRIREME_CHECK(found != left.end(),
                  "[parallel.data_parallel] unit {} lists parameter {}, but the module does not have it, "
                  "registers it first under another name, or another unit lists it too",
                  unit.name, spec.name);
    TRIREME_CHECK(found->second.sizes() == at::IntArrayRef(spec.shape),
                  "[parallel.data_parallel] parameter {} has shape {}, but {} is expected", spec.name,
                  fmt::join(found->second.sizes(), "x"), fmt::join(spec.shape, "x"));
    TRIREME_CHECK(found->second.is_leaf(), "[parallel.data_parallel] parameter {} is not a leaf tensor",
                  spec.name);
    params.emplace_back(spec.name, found->second);
    left.erase(found);
  }
  return params;
}

}  // namespace

DataParallel::DataParallel(torch::nn::Module& module, const std::vector<plan::UnitSpec>& units,
                           const comm::Mesh& mesh, const Options& options, const Initializer& initializer,
                           UseFrom use_from)
    : module_(module),
      options_(checked(options)),
      mesh_(checked(mesh, units)),
      use_from_(use_from),
      groups_(make_groups()),
      beside_(options.overlap && !options.device.is_cpu()),
      shared_{SideStream(options.device, beside_),
              SideStream(options.device, beside_),
              StoragePool(options.device.is_cpu()),
              StoragePool(options.device.is_cpu()),
              symmetric_pool(units),
              [this] { return module_.is_training() && evaluation_ == nullptr; }},
      units_(make_units(units, initializer)),
      programs_(units_, setting()),
      executor_(units_, use_from_),
      completion_(units_, [this](size_t unit, size_t param) { gradient_complete(unit, param); }),
      mean_(*mesh_.dp, options.average, options.device),
      frozen_alike_(*mesh_.dp, units_),
      unwinding_(std::uncaught_exceptions()) {
  for (const auto& unit : units_) views_.push_back(unit.get());
  // Writes past a bucket's version counters, by data(), would not reach masters that lie elsewhere.
  const bool watches_buckets =
      use_from_ == UseFrom::kBuckets && options_.users_module && options_.compute != at::kFloat;
  if (use_from_ == UseFrom::kOperators || watches_buckets) watch_use();
  unshard_held();
}

DataParallel::~DataParallel() {
  if (options_.users_module) give_back();
}

/// Memory for gradients that GPUs of one host sum in place, which needs gradients that travel in the dtype of
/// computation. Ranks must give a unit the same piece of this memory. So pieces that blocks share in turn are
/// all as large as the largest block: then every rank takes them in the same order. There is no such memory
/// for gradients that are freed by unit when operators may complete units in any order, or units are buckets.
std::optional<StoragePool> DataParallel::symmetric_pool(const std::vector<plan::UnitSpec>& units) const {
  const bool as_they_are = options_.compute == options_.reduce && options_.hook.hook == Hook::kNone &&
                           options_.reduction == Reduction::kOrdered;
  const bool take_turns = options_.policy.shard_gradients;
  if (options_.device.is_cpu() || groups_.shard->size() == 1 || !as_they_are ||
      (take_turns && use_from_ != UseFrom::kRunUnit))
    return {};
  size_t largest = 0;
  for (const plan::UnitSpec& unit : units | std::views::drop(1)) {
    if (!take_turns || unit.name == plan::kHeadUnit) continue;
    const int64_t ranks = groups_.shard->size() * groups_.replicate->size();
    const int64_t numel = plan::flat_layout(unit, ranks).numel();
    largest = std::max(largest, static_cast<size_t>(numel) * c10::elementSize(options_.compute));
  }
  const auto source = [group = groups_.shard](size_t bytes) {
    at::Tensor memory = group->symmetric_empty(static_cast<int64_t>(bytes), at::kByte);
    void* const data = memory.mutable_data_ptr();
    const c10::Device device = memory.device();
    return c10::DataPtr(
        data, new at::Tensor(std::move(memory)), [](void* kept) { delete static_cast<at::Tensor*>(kept); },
        device);
  };
  return StoragePool(source, largest);
}

UnitGroups DataParallel::make_groups() const {
  const comm::Mesh& mesh = mesh_;
  const int64_t rank = mesh.world->rank();
  UnitGroups groups;
  groups.tp = mesh.tp_gradients;
  groups.shard = options_.policy.hybrid ? mesh.shard : mesh.dp;
  groups.replicate = options_.policy.hybrid ? mesh.replicate : mesh.world->make_group("self", {rank});
  const int64_t together = options_.policy.reshard_after_forward;
  if (!options_.policy.shard_parameters || together <= 1 || together >= groups.shard->size()) return groups;
  const int64_t first = groups.shard->rank() / together * together;
  std::vector<int64_t> neighbours;
  for (int64_t i = first; i < first + together; ++i) {
    neighbours.push_back(groups.shard->ranks()[static_cast<size_t>(i)]);
  }
  groups.after_forward = mesh.world->make_group("after_forward", neighbours);
  return groups;
}

/// Checks what can be checked before memory is taken. A later failure gives a user's module its old memory
/// back, which is still there since `initializer` reads from it.
std::vector<std::unique_ptr<FlatUnit>> DataParallel::make_units(const std::vector<plan::UnitSpec>& specs,
                                                                const Initializer& initializer) {
  nn::check_torch_internals();
  TRIREME_CHECK(!specs.empty(), "[parallel.data_parallel] there are no units");
  TRIREME_CHECK(use_from_ != UseFrom::kBuckets || !options_.policy.shard_parameters,
                "[parallel.data_parallel] {} frees parameters unit by unit, so units cannot be buckets",
                options_.policy.label());
  std::map<std::string, at::Tensor> left;
  for (const ModuleParameter& param : module_parameters(module_)) {
    left.emplace(param.name, param.tensor);
    for (const std::string& alias : param.aliases) aliases_.emplace(alias, param.name);
  }
  std::vector<NamedTensors> params;
  for (const plan::UnitSpec& spec : specs) {
    index_.emplace(spec.name, params.size());
    params.push_back(take_params(spec, left));
  }
  TRIREME_CHECK(left.empty(), "[parallel.data_parallel] {} parameters belong to no unit, the first is {}",
                left.size(), left.begin()->first);
  std::vector<std::pair<at::Tensor, at::Tensor>> before;
  for (const NamedTensors& unit : params) {
    for (const auto& [name, leaf] : unit) {
      if (options_.users_module) before.emplace_back(leaf, leaf.detach());
    }
  }
  std::vector<std::unique_ptr<FlatUnit>> units;
  try {
    for (size_t unit = 0; unit < specs.size(); ++unit)
      units.push_back(std::make_unique<FlatUnit>(specs[unit], std::move(params[unit]), options_, setting(),
                                                 groups_, shared_, initializer));
  } catch (...) {
    for (auto& [leaf, values] : before) leaf.set_data(values);
    throw;
  }
  return units;
}

plan::EngineSetting DataParallel::setting() const {
  return {.policy = options_.policy,
          .mesh = mesh_.shape.of_engine(),
          .compute_bytes = static_cast<int64_t>(c10::elementSize(options_.compute)),
          .wire_bytes = static_cast<int64_t>(c10::elementSize(options_.reduce)),
          .wire_as_computed = options_.compute == options_.reduce,
          .reduces_once = options_.reduce_when == ReduceWhen::kOncePerStep,
          .sums_in_fp32 = options_.accumulate == plan::SumDtype::kFp32,
          .hook = options_.hook.hook,
          .reduction = options_.reduction,
          .prefetch = options_.prefetch,
          .beside = beside_,
          .use_from = use_from_,
          .stays = stays_,
          .device = options_.device.is_cpu() ? plan::Device::kCpu : plan::Device::kCuda};
}

/// Notices what optimizers of torch write to pieces. Nothing announces the use of buckets, so they are
/// watched as well when an update has to reach them, or has to be averaged first.
void DataParallel::watch_updates() {
  if (handed_out_) return;
  if (!touch_) make_watch();
  const bool in_place = options_.compute == at::kFloat && !options_.policy.shard_optimizer &&
                        options_.hook.hook != Hook::kLocalSgd;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (use_from_ == UseFrom::kBuckets && !in_place) mark_params(unit);
    units_[unit]->make_pieces();
    for (const FlatUnit::Piece& piece : units_[unit]->pieces())
      touch_->mark(piece.master, units_.size() + unit);
  }
}

void DataParallel::make_watch() {
  touch_ = std::make_unique<nn::TouchWatch>(
      [this](const std::vector<size_t>& tokens, nn::Nesting nesting) { touched(tokens, nesting); },
      [this](size_t token, int64_t offset) { written(token, offset); });
}

void DataParallel::mark_params(size_t unit) {
  params_marked_ = true;
  for (const auto& [name, leaf] : units_[unit]->params()) touch_->mark(leaf, unit);
}

void DataParallel::watch_use() {
  make_watch();
  for (size_t unit = 0; unit < units_.size(); ++unit) mark_params(unit);
}

}  // namespace trireme::parallel
