#include "trireme/parallel/has_parts.h"

#include <torch/nn/module.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/parallel/module_parameters.h"

namespace trireme::parallel {
namespace {

using torch::nn::Module;

void check_fits(const std::string& name, const at::Tensor& held, const plan::Part& part) {
  if (part.is_whole()) return;
  const plan::Region region = part.region(held.sizes().vec(), {0, held.numel()});
  std::string why = plan::misfit(region, part.whole);
  if (why.empty() && plan::checked_numel(region.extent) != held.numel())
    why = fmt::format("the box [{}] has not as many elements", fmt::join(region.extent, ", "));
  if (why.empty()) return;
  throw LogicError("[parallel.parts] parameter {} is [{}] and said to be a part of [{}]: {}; correct parts()",
                   name, fmt::join(held.sizes(), ", "), fmt::join(part.whole, ", "), why);
}

using ByTensor = std::unordered_map<const c10::TensorImpl*, plan::Part>;

void add_parts(const std::string& path, const Module& module, ByTensor& all) {
  const auto* const speaker = dynamic_cast<const HasParts*>(&module);
  if (speaker == nullptr) return;
  const auto params = module.named_parameters(/*recurse=*/false);
  for (const auto& [name, part] : speaker->parts()) {
    const std::string full = path.empty() ? name : path + "." + name;
    const at::Tensor* const param = params.find(name);
    if (param == nullptr) {
      throw LogicError(
          "[parallel.parts] {} names a part of {}, but registers no such parameter; name those "
          "that the module registers itself",
          module.name(), full);
    }
    check_fits(full, *param, part);
    const auto [known, is_new] = all.emplace(param->unsafeGetTensorImpl(), part);
    if (is_new || known->second == part) continue;
    throw LogicError(
        "[parallel.parts] two modules share the parameter {}, and say that it is another part of "
        "[{}] and of [{}]; cut both in one way",
        full, fmt::join(part.whole, ", "), fmt::join(known->second.whole, ", "));
  }
}

/// What a rank says of a part: where the box begins, its extent, and whether it is a further copy.
std::vector<double> numbers_of(const at::Tensor& held, const plan::Part& part) {
  const plan::Region region = part.region(held.sizes().vec(), {0, held.numel()});
  std::vector<double> numbers(region.start.begin(), region.start.end());
  numbers.insert(numbers.end(), region.extent.begin(), region.extent.end());
  numbers.push_back(static_cast<double>(part.copy));
  return numbers;
}

/// The box that a rank told, of which `mine` has the dimensions; without elements where it is a copy.
plan::Region region_from(std::vector<double>::const_iterator numbers, const plan::Region& mine) {
  const auto dims = std::ssize(mine.start);
  plan::Region region = plan::Region::box({numbers, numbers + dims}, {numbers + dims, numbers + 2 * dims});
  region.view = mine.view;
  if (numbers[2 * dims] != 0.0) region.range = {};
  return region;
}

}  // namespace

Parts declared_parts(const Module& module) {
  ByTensor all;
  module.apply([&](const std::string& path, const Module& each) { add_parts(path, each, all); });
  Parts parts;
  for (const ModuleParameter& param : module_parameters(module)) {
    const auto found = all.find(param.tensor.unsafeGetTensorImpl());
    if (found != all.end()) parts.emplace(param.name, found->second);
  }
  return parts;
}

Parts parts_on(const Module& module, const comm::Mesh& mesh) {
  Parts parts = declared_parts(module);
  if (parts.empty()) return parts;
  for (const ModuleParameter& param : module_parameters(module))
    parts.try_emplace(param.name, plan::Part{.copies = mesh.tp->size(), .copy = mesh.tp->rank()});
  return parts;
}

void check_cover(const Module& module, const Parts& parts, const comm::Mesh& mesh) {
  std::vector<double> mine;
  std::vector<std::pair<std::string, plan::Region>> cut;
  for (const ModuleParameter& param : module_parameters(module)) {
    const auto found = parts.find(param.name);
    if (found == parts.end() || found->second.is_whole()) continue;
    const std::vector<double> numbers = numbers_of(param.tensor, found->second);
    cut.emplace_back(param.name, found->second.region(param.tensor.sizes().vec(), {0, param.tensor.numel()}));
    mine.insert(mine.end(), numbers.begin(), numbers.end());
  }
  if (cut.empty()) return;
  const auto ranks = comm::gather_scalars(*mesh.stage, mine);
  const auto tp = static_cast<size_t>(mesh.tp->size());
  std::ptrdiff_t at = 0;
  for (const auto& [name, region] : cut) {
    const plan::Shape& whole = parts.at(name).whole;
    for (size_t first = 0; first < ranks.size(); first += tp) {
      std::vector<plan::Region> regions;
      std::vector<const plan::Region*> pointers;
      for (size_t rank = first; rank < first + tp; ++rank)
        regions.push_back(region_from(ranks[rank].begin() + at, region));
      for (const plan::Region& each : regions) pointers.push_back(&each);
      if (const std::string why = plan::coverage_error(whole, pointers); !why.empty()) {
        throw LogicError(
            "[parallel.parts] the {} ranks along tp have parts of {} that are not all of [{}] once: {}; give "
            "layers that are cut the group Mesh::tp of the mesh that the module is wrapped for",
            tp, name, fmt::join(whole, ", "), why);
      }
    }
    at += 2 * std::ssize(region.start) + 1;
  }
}

}  // namespace trireme::parallel
