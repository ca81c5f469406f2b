#include "trireme/plan/flat_layout.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/nf4_format.h"
#include "trireme/base/round_up.h"

namespace trireme::plan {

FlatLayout::FlatLayout(const std::vector<ParamSpec>& params, int64_t shards, int64_t alignment)
    : shards_(shards) {
  TRIREME_CHECK(shards >= 1 && alignment >= 1,
                "[plan.flat_layout] shards={} and alignment={} must be at least 1", shards, alignment);
  int64_t offset = 0;
  for (const ParamSpec& param : params) {
    offset = round_up(offset, alignment);
    entries_.push_back(
        {param.name, param.shape, offset, param.numel(), param.decays, param.layer, param.part, param.nf4});
    offset += param.numel();
    used_ += param.numel();
  }
  shard_numel_ = round_up((offset + shards - 1) / shards, alignment);
}

const FlatEntry& FlatLayout::entry(const std::string& name) const {
  for (const FlatEntry& candidate : entries_) {
    if (candidate.name == name) return candidate;
  }
  throw LogicError("[plan.flat_layout] there is no parameter '{}' among {}", name, entries_.size());
}

FlatLayout flat_layout(const UnitSpec& unit, int64_t shards) {
  constexpr int64_t kAlignment = FlatLayout::kAlignment;
  return {unit.trained(), shards, unit.fp8_block ? 2 * kAlignment : kAlignment};
}

FlatLayout frozen_layout(const UnitSpec& unit, int64_t shards) {
  const bool nf4 = std::ranges::any_of(unit.params, &ParamSpec::nf4);
  return {unit.frozen(), shards, nf4 ? kNf4Block : FlatLayout::kAlignment};
}

}  // namespace trireme::plan
