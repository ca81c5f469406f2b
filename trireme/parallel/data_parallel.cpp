#include "trireme/parallel/data_parallel.h"

#include <ATen/ATen.h>

#include <map>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/parallel/backward_hooks.h"

namespace trireme::parallel {
namespace {

/// The parameters of `unit` by name, each taken out of `left`.
std::vector<std::pair<std::string, at::Tensor>> take_params(const plan::UnitSpec& unit,
                                                            std::map<std::string, at::Tensor>& left) {
  std::vector<std::pair<std::string, at::Tensor>> params;
  for (const plan::ParamSpec& spec : unit.params) {
    const auto found = left.find(spec.name);
    TRIREME_CHECK(found != left.end(),
                  "[parallel.data_parallel] unit {} names parameter {}, which the module does not "
                  "have or another unit took",
                  unit.name, spec.name);
    TRIREME_CHECK(found->second.sizes() == at::IntArrayRef(spec.shape),
                  "[parallel.data_parallel] parameter {} has "
                  "shape {}, expected {}",
                  spec.name, fmt::join(found->second.sizes(), "x"), fmt::join(spec.shape, "x"));
    params.emplace_back(spec.name, found->second);
    left.erase(found);
  }
  return params;
}

}  // namespace

DataParallel::DataParallel(torch::nn::Module& module, const std::vector<plan::UnitSpec>& units,
                           const comm::Mesh& mesh, const FlatOptions& options, const Initializer& initializer)
    : reshard_after_forward_(options.policy.reshard_after_forward) {
  std::map<std::string, at::Tensor> left;
  for (const auto& entry : module.named_parameters()) left.emplace(entry.key(), entry.value());
  for (const plan::UnitSpec& spec : units) {
    units_.push_back(
        std::make_unique<FlatUnit>(spec.name, take_params(spec, left), options, mesh.shard, initializer));
  }
  TRIREME_CHECK(left.empty(), "[parallel.data_parallel] {} parameters belong to no unit, the first is {}",
                left.size(), left.begin()->first);
}

FlatUnit& DataParallel::unit(const std::string& name) {
  for (const auto& candidate : units_) {
    if (candidate->name() == name) return *candidate;
  }
  throw LogicError("[parallel.data_parallel] the model ran a unit '{}' that was not declared", name);
}

void DataParallel::begin_forward() {
  units_.front()->gather_parameters();
}

at::Tensor DataParallel::run_unit(const std::string& name, const at::Tensor& x,
                                  const std::function<at::Tensor(const at::Tensor&)>& forward) {
  FlatUnit& current = unit(name);
  current.gather_parameters();
  const bool differentiates = at::GradMode::is_enabled();
  const at::Tensor input = call_after_backward(x, [this, &current] {
    current.reduce_gradients(last_micro_batch_);
    current.release_parameters();
  });
  const at::Tensor output = forward(input);
  if (differentiates) {
    call_before_backward(output, [&current] {
      current.gather_parameters();
      current.prepare_gradients();
    });
  }
  if (differentiates ? reshard_after_forward_ : !held_) current.release_parameters();
  return output;
}

void DataParallel::backward(const at::Tensor& loss, double scale, bool last_micro_batch) {
  last_micro_batch_ = last_micro_batch;
  units_.front()->prepare_gradients();
  loss.backward(at::full({}, scale, loss.options()));
  for (const auto& each : units_) {
    // The root, and units whose input needed no gradient, end here; a unit that took no part has zero
    // gradients.
    if (last_micro_batch && !each->reduced()) each->prepare_gradients();
    each->reduce_gradients(last_micro_batch);
  }
}

double DataParallel::local_grad_squares() const {
  double sum = 0.0;
  for (const auto& each : units_) sum += each->shard_grad_squares();
  return sum;
}

std::vector<optim::FlatParam> DataParallel::optimizer_params() const {
  std::vector<optim::FlatParam> params;
  for (const auto& each : units_) params.push_back(each->optimizer_param());
  return params;
}

void DataParallel::finish_step() {
  const at::NoGradGuard no_grad;
  for (const auto& each : units_) each->publish_update();
}

DataParallel::Held::Held(DataParallel& engine) : engine_(engine) {
  engine_.held_ = true;
  for (const auto& each : engine_.units_) each->gather_parameters();
}

DataParallel::Held::~Held() {
  engine_.held_ = false;
  for (const auto& each : engine_.units_) each->release_parameters();
}

void DataParallel::visit_weights(
    const std::function<void(const std::string&, const at::Tensor&)>& body) const {
  const at::NoGradGuard no_grad;
  std::map<std::string, const FlatUnit*> owners;
  for (const auto& each : units_) {
    for (const plan::FlatEntry& entry : each->layout().entries()) owners.emplace(entry.name, each.get());
  }
  const FlatUnit* gathered = nullptr;
  at::Tensor master;
  for (const auto& [name, owner] : owners) {
    if (owner != gathered) {
      master = owner->full_master();
      gathered = owner;
    }
    const plan::FlatEntry& entry = owner->layout().entry(name);
    body(name, master.narrow(0, entry.offset, entry.numel).view(entry.shape).to(at::kCPU));
  }
}

std::string weights_digest(const DataParallel& engine) {
  StreamingHash hash;
  engine.visit_weights([&](const std::string&, const at::Tensor& weight) {
    const at::Tensor whole = weight.contiguous();
    hash.update(whole.data_ptr(), whole.nbytes());
  });
  return hex64(hash.digest());
}

}  // namespace trireme::parallel
