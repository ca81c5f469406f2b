// What the engine holds, seen as whole parameters.
#include <ATen/ATen.h>

#include <set>
#include <string>

#include "trireme/base/hash.h"
#include "trireme/parallel/box.h"
#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {

DataParallel::Weights::Weights(DataParallel& engine) : engine_(engine) {
  const at::NoGradGuard no_grad;
  engine_.notice_update();
  engine_.take_writes();
}

at::Tensor DataParallel::Weights::whole_frozen(size_t unit, const std::string& parameter) {
  const FlatUnit& flat = *engine_.units_[unit];
  if (gathered_frozen_ != unit) {
    frozen_.reset();  // one unit at a time
    frozen_ = flat.whole_frozen();
    gathered_frozen_ = unit;
  }
  const plan::FlatEntry& entry = *flat.frozen_entry(parameter);
  return engine_.joined(entry, flat.frozen_value(frozen_, entry))
      .to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor DataParallel::Weights::whole(const std::string& parameter) {
  const at::NoGradGuard no_grad;
  if (const auto frozen = engine_.unit_of_frozen(parameter)) return whole_frozen(*frozen, parameter);
  const size_t unit = engine_.place_of(parameter).first;
  if (gathered_ != unit) {
    master_.reset();  // one unit at a time
    master_ = engine_.units_[unit]->full_master();
    gathered_ = unit;
  }
  const plan::FlatEntry& entry = engine_.units_[unit]->layout().entry(parameter);
  return engine_.joined(entry, master_.narrow(0, entry.offset, entry.numel).view(entry.shape))
      .to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

/// Ranks tell each other where their boxes are, which differ in size where a vocabulary is uneven.
at::Tensor DataParallel::joined(const plan::FlatEntry& entry, const at::Tensor& held) const {
  if (mesh_.tp->size() == 1 || entry.part.is_whole()) return held;
  const plan::Region mine = entry.region({entry.offset, entry.end()});
  const comm::Subject subject(*mesh_.tp, entry.name);
  std::vector<double> box(mine.start.begin(), mine.start.end());
  box.insert(box.end(), mine.extent.begin(), mine.extent.end());
  const auto boxes = comm::gather_scalars(*mesh_.tp, box);
  std::vector<plan::Region> regions;
  int64_t most = 0;
  for (const std::vector<double>& numbers : boxes) {
    const auto middle = numbers.begin() + std::ssize(mine.start);
    regions.push_back(plan::Region::box({numbers.begin(), middle}, {middle, numbers.end()}));
    most = std::max(most, regions.back().numel());
  }
  at::Tensor padded = at::zeros({most}, held.options());
  padded.narrow(0, 0, held.numel()).copy_(held.reshape({-1}));
  const at::Tensor all = comm::gather_rows(*mesh_.tp, padded);
  at::Tensor whole = at::empty(mine.shape_in(entry.part.whole), held.options());
  for (size_t rank = 0; rank < regions.size(); ++rank) {
    const at::Tensor place = box_of(whole, regions[rank]);
    place.copy_(all[static_cast<int64_t>(rank)].narrow(0, 0, regions[rank].numel()).view(place.sizes()));
  }
  return whole.view(entry.part.whole);
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

void DataParallel::load_frozen(const Initializer& values) {
  for (const auto& unit : units_) unit->load_frozen(values);
}

void DataParallel::visit_frozen(const std::function<void(const std::string&, const at::Tensor&)>& body) {
  const at::NoGradGuard no_grad;
  for (const auto& unit : units_) {
    unit->visit_frozen([&](const plan::FlatEntry& entry, const at::Tensor& held) {
      body(entry.name, joined(entry, held).to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    });
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
