#include "trireme/plan/placement.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/plan/cost.h"

namespace trireme::plan {
namespace {

int64_t product_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

/// What slices of a dimension have together when all are as long as the longest.
int64_t padded(int64_t size, int64_t ranks) {
  return shard_range(size, ranks, 0).size() * ranks;
}

}  // namespace

std::string to_text(const TensorPlacement& placement) {
  switch (placement.kind) {
    case TensorPlacement::Kind::kReplicate:
      return "R";
    case TensorPlacement::Kind::kShard:
      return fmt::format("S({})", placement.dim);
    case TensorPlacement::Kind::kPartial:
      return "P";
  }
  throw LogicError("[plan.placement] unknown kind {}", static_cast<int>(placement.kind));
}

std::optional<TensorPlacement> parse_placement(std::string_view text) {
  if (text == "R") return TensorPlacement::replicate();
  if (text == "P") return TensorPlacement::partial();
  if (!text.starts_with("S(")) return std::nullopt;
  int64_t dim = -1;
  std::from_chars(text.data() + 2, text.data() + text.size(), dim);
  const auto placement = TensorPlacement::shard(dim);
  if (dim < 0 || text != to_text(placement)) return std::nullopt;
  return placement;
}

Range shard_range(int64_t size, int64_t ranks, int64_t rank) {
  TRIREME_CHECK(size >= 0 && 0 <= rank && rank < ranks,
                "[plan.placement] there is no slice {} of {} of a dimension of size {}", rank, ranks, size);
  const int64_t each = size / ranks, more = size % ranks, begin = rank * each + std::min(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

int64_t redistribute_bytes(const TensorPlacement& from, const TensorPlacement& to, int64_t whole_bytes,
                           int64_t ranks) {
  const auto sent = [&](Collective collective, int64_t bytes) {
    return wire_bytes(collective, bytes, ranks);
  };
  if (from == to || from.is_replicate() || to.is_partial()) return 0;
  if (from.is_shard()) {
    return to.is_shard() ? sent(Collective::kAllToAll, whole_bytes / ranks)
                         : sent(Collective::kAllGather, whole_bytes);
  }
  const int64_t shard = sent(Collective::kReduceScatter, whole_bytes);
  return to.is_shard() ? shard : shard + sent(Collective::kAllGather, whole_bytes);
}

int64_t redistribute_bytes(const TensorPlacement& from, const TensorPlacement& to, Shape whole,
                           int64_t element_bytes, int64_t ranks) {
  if (from.is_partial() && to.is_replicate()) whole = {padded(product_of(whole), ranks)};
  for (const TensorPlacement& placement : {from, to}) {
    if (!placement.is_shard()) continue;
    const auto dim = static_cast<size_t>(placement.dim);
    TRIREME_CHECK(dim < whole.size(), "[plan.placement] {} of a tensor of {} dimensions", to_text(placement),
                  whole.size());
    whole[dim] = padded(whole[dim], ranks);
  }
  return redistribute_bytes(from, to, product_of(whole) * element_bytes, ranks);
}

}  // namespace trireme::plan
