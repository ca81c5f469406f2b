// What the engine holds, seen as whole parameters.
#include <ATen/ATen.h>

#include <map>

#include "trireme/base/hash.h"
#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {

void DataParallel::visit_weights(const std::function<void(const std::string&, const at::Tensor&)>& body) {
  const at::NoGradGuard no_grad;
  take_writes();
  std::map<std::string, FlatUnit*> owners;
  for (const auto& unit : units_) {
    for (const plan::FlatEntry& entry : unit->layout().entries()) owners.emplace(entry.name, unit.get());
  }
  const FlatUnit* gathered = nullptr;
  at::Tensor master;
  for (const auto& [name, owner] : owners) {
    if (owner != gathered) {
      master.reset();  // one unit at a time
      master = owner->full_master();
      gathered = owner;
    }
    const plan::FlatEntry& entry = owner->layout().entry(name);
    body(name, master.narrow(0, entry.offset, entry.numel).view(entry.shape).to(at::kCPU));
  }
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
