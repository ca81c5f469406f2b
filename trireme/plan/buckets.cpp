#include "trireme/plan/buckets.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "trireme/base/error.h"

namespace trireme::plan {

std::vector<UnitSpec> make_buckets(const std::vector<ParamSpec>& params, int64_t element_bytes,
                                   int64_t cap_bytes) {
  TRIREME_CHECK(element_bytes > 0 && cap_bytes > 0,
                "[plan.buckets] element_bytes={} and cap_bytes={} must be above 0", element_bytes, cap_bytes);
  std::vector<UnitSpec> buckets;
  int64_t room = 0;
  for (size_t i = params.size(); i-- > 0;) {
    if (room <= 0) {
      room = buckets.empty() ? std::min(kFirstBucketBytes, cap_bytes) : cap_bytes;
      buckets.push_back({fmt::format("bucket {}", buckets.size()), {}});
    }
    buckets.back().params.push_back(params[i]);
    room -= params[i].numel() * element_bytes;
  }
  for (UnitSpec& bucket : buckets) std::ranges::reverse(bucket.params);
  return buckets;
}

int64_t bucket_bytes(double mib) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const double bytes = mib * (1 << 20);
  if (bytes >= static_cast<double>(kMost)) return kMost;
  return std::max<int64_t>(1, static_cast<int64_t>(bytes));
}

std::vector<UnitSpec> engine_units(const Config& config, const ModelFacts& facts) {
  if (config.parallel.bucket_mib == 0.0) return facts.units;
  std::vector<ParamSpec> params;
  UnitSpec frozen{"frozen", {}}, nf4{"frozen_nf4", {}};
  for (const UnitSpec& unit : facts.units) {
    const std::vector<ParamSpec> trained = unit.trained(), kept = unit.frozen();
    params.insert(params.end(), trained.begin(), trained.end());
    for (const ParamSpec& param : kept) (param.nf4 ? nf4 : frozen).params.push_back(param);
  }
  std::vector<UnitSpec> units =
      make_buckets(params, bytes_of(config.precision.compute), bucket_bytes(config.parallel.bucket_mib));
  for (UnitSpec& unit : {std::ref(frozen), std::ref(nf4)})  // these travel nowhere
    if (!unit.params.empty()) units.push_back(std::move(unit));
  return units;
}

}  // namespace trireme::plan
