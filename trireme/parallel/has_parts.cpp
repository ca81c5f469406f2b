#include "trireme/parallel/has_parts.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
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

/// A hash of the elements that a part begins with. Draws of a generator are seldom the same; zeros, ones and
/// the biases of gates often are.
struct Sample {
  uint64_t hash = 0;
  bool is_drawn = false;  ///< most of them differ from each other
};

Sample sample_of(const at::Tensor& held) {
  constexpr int64_t kFew = 8, kMost = 64;
  const at::NoGradGuard no_grad;
  const at::Tensor first = held.detach().reshape({-1}).narrow(0, 0, std::min(held.numel(), kMost));
  const at::Tensor values = first.to(at::kCPU, at::kFloat).contiguous();
  const auto* const begin = values.const_data_ptr<float>();
  const std::set<float> distinct(begin, begin + values.numel());
  return {.hash = xxh3(begin, values.nbytes()),
          .is_drawn = values.numel() >= kFew && 2 * std::ssize(distinct) > values.numel()};
}

/// The numbers that a rank says of a part.
struct Told {
  plan::Region region;  ///< without elements where it is a further copy
  int64_t copies = 1, copy = 0;
  Sample sample;
};

/// As doubles, which hold each of them exactly.
std::vector<double> numbers_of(const at::Tensor& held, const plan::Part& part) {
  const plan::Region region = part.region(held.sizes().vec(), {0, held.numel()});
  const Sample sample = sample_of(held);
  const auto [upper, lower] = comm::in_halves(sample.hash);
  std::vector<double> numbers(region.start.begin(), region.start.end());
  numbers.insert(numbers.end(), region.extent.begin(), region.extent.end());
  for (const int64_t number : {part.copies, part.copy, int64_t{sample.is_drawn}})
    numbers.push_back(static_cast<double>(number));
  numbers.insert(numbers.end(), {upper, lower});
  return numbers;
}

constexpr std::ptrdiff_t kBesideTheBox = 5;  ///< numbers of a part

/// The part that the numbers from `numbers` on say of a part that has the dimensions of `mine`.
Told told_by(std::vector<double>::const_iterator numbers, const plan::Region& mine) {
  const auto dims = std::ssize(mine.start);
  const auto more = numbers + 2 * dims;
  Told told{.region = plan::Region::box({numbers, numbers + dims}, {numbers + dims, more}),
            .copies = static_cast<int64_t>(more[0]),
            .copy = static_cast<int64_t>(more[1]),
            .sample = {comm::from_halves(more[3], more[4]), more[2] != 0.0}};
  told.region.view = mine.view;
  if (told.copy != 0) told.region.range = {};
  return told;
}

bool in_one_place(const Told& a, const Told& b) {
  return a.region.start == b.region.start && a.region.extent == b.region.extent;
}

/// The engine adds up the gradients of neighbours as those of copies. `ranks`: what those along tp say of a
/// parameter.
void check_copies(const std::string& name, bool is_whole, const std::vector<Told>& ranks) {
  const int64_t tp = std::ssize(ranks);
  for (int64_t rank = 0; rank < tp; ++rank) {
    const Told& mine = ranks[static_cast<size_t>(rank)];
    const bool divides = is_whole ? mine.copies == tp : mine.copies >= 1 && tp % mine.copies == 0;
    if (divides && mine.copy == rank % mine.copies) {
      const Told& first = ranks[static_cast<size_t>(rank - mine.copy)];
      if (first.copies == mine.copies && in_one_place(first, mine)) continue;
    }
    throw LogicError(
        "[parallel.parts] rank {} of {} along tp says that it has copy {} of {} copies of {}, which begins "
        "at "
        "[{}]; {}",
        rank, tp, mine.copy, mine.copies, name, fmt::join(mine.region.start, ", "),
        is_whole ? "leave out of parts() what all ranks have whole"
                 : "copies are those of neighbours with one box: for n of them, which divide the ranks, say "
                   "copies n and copy rank % n");
  }
}

/// Ranks that are seeded alike and draw their parts alone draw one part several times.
void check_drawn_once(const std::string& name, const std::vector<Told>& ranks) {
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    for (size_t other = 0; other < rank; ++other) {
      const Told &a = ranks[other], &b = ranks[rank];
      if (!b.sample.is_drawn || a.sample.hash != b.sample.hash || in_one_place(a, b)) continue;
      throw LogicError(
          "[parallel.parts] ranks {} and {} along tp have different parts of {}, but the same values in "
          "them; "
          "draw the whole matrix on each rank and keep the rank's part, or read it by load_weights()",
          other, rank, name);
    }
  }
}

/// As check_cover() says it, of a parameter that is cut.
void check_covered(const std::string& name, const plan::Shape& whole, const std::vector<Told>& ranks) {
  std::vector<const plan::Region*> regions;
  for (const Told& told : ranks) regions.push_back(&told.region);
  const std::string why = plan::coverage_error(whole, regions);
  if (why.empty()) return;
  throw LogicError(
      "[parallel.parts] the {} ranks along tp have parts of {} that are not all of [{}] once: {}; give "
      "layers "
      "that are cut the group Mesh::tp of the mesh that the module is wrapped for",
      ranks.size(), name, fmt::join(whole, ", "), why);
}

/// A hash of the bytes, so that NaN is NaN.
uint64_t hash_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
  return xxh3(values.const_data_ptr(), values.nbytes());
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
  if (parts.empty()) return;
  std::vector<double> mine;
  std::vector<std::pair<std::string, plan::Region>> told;
  for (const ModuleParameter& param : module_parameters(module)) {
    const plan::Part& part = parts.at(param.name);
    const std::vector<double> numbers = numbers_of(param.tensor, part);
    told.emplace_back(param.name, part.region(param.tensor.sizes().vec(), {0, param.tensor.numel()}));
    mine.insert(mine.end(), numbers.begin(), numbers.end());
  }
  const auto ranks = comm::gather_scalars(*mesh.stage, mine);
  const auto tp = static_cast<size_t>(mesh.tp->size());
  std::ptrdiff_t at = 0;
  for (const auto& [name, region] : told) {
    const plan::Part& part = parts.at(name);
    for (size_t first = 0; first < ranks.size(); first += tp) {
      std::vector<Told> group;
      for (size_t rank = first; rank < first + tp; ++rank)
        group.push_back(told_by(ranks[rank].begin() + at, region));
      check_copies(name, part.is_whole(), group);
      if (part.is_whole()) continue;
      check_covered(name, part.whole, group);
      // Other ranks of data take the values of the first.
      if (first == 0) check_drawn_once(name, group);
    }
    at += 2 * std::ssize(region.start) + kBesideTheBox;
  }
}

void check_buffers_alike(const Module& module, const Parts& parts, const comm::Mesh& mesh) {
  if (parts.empty() || mesh.tp->size() == 1) return;
  std::vector<std::string> names;
  std::vector<double> mine;
  for (const auto& entry : module.named_buffers()) {
    if (!entry.value().defined()) continue;
    names.push_back(entry.key());
    const auto halves = comm::in_halves(hash_of(entry.value()));
    mine.insert(mine.end(), halves.begin(), halves.end());
  }
  const auto ranks = comm::gather_scalars(*mesh.stage, mine);
  const auto tp = static_cast<size_t>(mesh.tp->size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const size_t first = rank / tp * tp;
    const auto [differs, other] = std::ranges::mismatch(ranks[rank], ranks[first]);
    if (differs == ranks[rank].end()) continue;
    throw LogicError(
        "[parallel.parts] ranks {} and {} along tp have different values of the buffer {}, but a buffer "
        "takes "
        "rank 0's; keep what belongs to a rank's part as a plain member, not as a buffer, and seed ranks "
        "alike "
        "that draw a buffer",
        mesh.stage->ranks()[first], mesh.stage->ranks()[rank],
        names[static_cast<size_t>(differs - ranks[rank].begin()) / 2]);
  }
}

}  // namespace trireme::parallel
