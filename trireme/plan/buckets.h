#pragma once
// Units by size instead of by structure, for policies that keep parameters whole.
#include <cstdint>
#include <vector>

#include "trireme/plan/model_facts.h"

namespace trireme::plan {

/// PyTorch DDP's first bucket: small, so that reduction begins early in backward.
inline constexpr int64_t kFirstBucketBytes = int64_t{1} << 20;

/// `params` (in forward order) from the last to the first, cut so that a bucket is closed once it has reached
/// its cap: kFirstBucketBytes, or `cap_bytes` if that is less, for the first, `cap_bytes` for the others.
/// Every parameter is in exactly one bucket and keeps its place among those of its bucket. Buckets are named
/// "bucket 0", "bucket 1", ... in that order.
std::vector<UnitSpec> make_buckets(const std::vector<ParamSpec>& params, int64_t element_bytes,
                                   int64_t cap_bytes);

/// A cap of `mib` MiB in bytes: at least 1, and the largest number where there is no larger one, as for
/// infinity.
int64_t bucket_bytes(double mib);

/// The units that the engine works on under `config`: those of `facts`, or buckets of parallel.bucket_mib.
std::vector<UnitSpec> engine_units(const Config& config, const ModelFacts& facts);

}  // namespace trireme::plan
