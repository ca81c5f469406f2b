#pragma once
// How the ranks of one group hold a tensor together, as plain data, and what it costs to go from one way to
// another: tensor/redistribute.h does so. The words are those of PyTorch's DTensor.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "trireme/plan/region.h"

namespace trireme::plan {

/// How ranks hold a tensor. (plan::Placement is another thing: the one of a pipeline's stages.)
struct TensorPlacement {
  enum class Kind {
    kReplicate,  ///< every rank has the whole, with the same bits
    kShard,      ///< every rank has a slice along `dim`, by group rank
    kPartial     ///< every rank has a tensor of the whole's shape, and the whole is their sum
  };
  Kind kind = Kind::kReplicate;
  int64_t dim = 0;  ///< kShard only: of the tensor, from 0 on

  static constexpr TensorPlacement replicate() { return {}; }
  static constexpr TensorPlacement shard(int64_t dim) { return {Kind::kShard, dim}; }
  static constexpr TensorPlacement partial() { return {Kind::kPartial}; }
  constexpr bool is_replicate() const { return kind == Kind::kReplicate; }
  constexpr bool is_shard() const { return kind == Kind::kShard; }
  constexpr bool is_partial() const { return kind == Kind::kPartial; }
  bool operator==(const TensorPlacement&) const = default;
};
/// "R", "P", or "S(0)" with the dimension.
std::string to_text(const TensorPlacement& placement);
/// The other way round; none for other words.
std::optional<TensorPlacement> parse_placement(std::string_view text);

/// A tensor that is differentiated has two placements, and the second does not follow from the first: the
/// gradient of a replicated value is replicated where all ranks compute the same with it, and partial where
/// each computes its share. A sharded value has a gradient that is sharded alike, since the shapes are equal.
struct Placed {
  TensorPlacement value, gradient;
  bool operator==(const Placed&) const = default;
};

/// The indices along a sharded dimension of `size` that `rank` of `ranks` has: as even as possible, and the
/// first size % ranks ranks have one more than the others, which may have none. Throws LogicError for a rank
/// outside 0 to ranks-1 and a negative size.
Range shard_range(int64_t size, int64_t ranks, int64_t rank);

/// Bytes that each of `ranks` ranks sends, as the communicator counts them, when a tensor of `whole_bytes`
/// goes from one placement to another: S(n-1)/n for each collective, where S = whole_bytes, but whole_bytes/n
/// between two sharded dimensions. A partial tensor is reduced in its own dtype, and becomes a replicated one
/// in two collectives. Shards must be of equal sizes; the other overload takes any.
int64_t redistribute_bytes(const TensorPlacement& from, const TensorPlacement& to, int64_t whole_bytes,
                           int64_t ranks);
/// The same for a tensor of the shape `whole`: slices travel padded to the size of rank 0's, the largest.
int64_t redistribute_bytes(const TensorPlacement& from, const TensorPlacement& to, Shape whole,
                           int64_t element_bytes, int64_t ranks);

}  // namespace trireme::plan
