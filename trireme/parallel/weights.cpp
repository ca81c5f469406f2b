// What the engine holds, seen as whole parameters.
#include <ATen/ATen.h>

#include <set>
#include <string>

#include "trireme/base/hash.h"
#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {

DataParallel::Weights::Weights(DataParallel& engine) : engine_(engine) {
  const at::NoGradGuard no_grad;
  engine_.notice_update();
  engine_.take_writes();
}

at::Tensor DataParallel::Weights::whole(const std::string& parameter) {
  const at::NoGradGuard no_grad;
  const size_t unit = engine_.place_of(parameter).first;
  if (gathered_ != unit) {
    master_.reset();  // one unit at a time
    master_ = engine_.units_[unit]->full_master();
    gathered_ = unit;
  }
  const plan::FlatEntry& entry = engine_.units_[unit]->layout().entry(parameter);
  return master_.narrow(0, entry.offset, entry.numel)
      .view(entry.shape)
      .to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

void DataParallel::visit_weights(const std::function<void(const std::string&, const at::Tensor&)>& body) {
  const at::NoGradGuard no_grad;
  std::set<std::string> names;
  for (const auto& unit : units_) {
    for (const plan::FlatEntry& entry : unit->layout().entries()) names.insert(entry.name);
  }
  Weights weights(*this);
  for (const std::string& name : names) body(name, weights.whole(name));
}

std::string weights_digest(DataParallel& engine) {
  StreamingHash hash;
  engine.visit_weights([&](const std::string&, const at::Tensor& weight) {
    const at::Tensor whole = weight.contiguous();
    hash.update(whole.data_ptr(), whole.nbytes());
  });
  return hex64(hash.digest());
}

}  // namespace trireme::parallel
