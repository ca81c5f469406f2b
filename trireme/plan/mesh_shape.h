#pragma once
// A mesh of ranks: axes with sizes, and the arithmetic between a rank and its coordinates. The order from
// slowest to fastest is pp, dp_replicate, dp_shard, cp, tp, so that ranks that talk most are neighbours.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/config.h"

namespace trireme::plan {

enum class Axis { kPp, kDpReplicate, kDpShard, kCp, kTp };
inline constexpr size_t kAxes = 5;
inline constexpr std::array<std::string_view, kAxes> kAxisNames = {"pp", "dp_replicate", "dp_shard", "cp",
                                                                   "tp"};

class MeshShape {
 public:
  using Coordinates = std::array<int64_t, kAxes>;

  MeshShape() { sizes_.fill(1); }
  /// Sizes in the order of Axis, each at least 1.
  explicit MeshShape(const Coordinates& sizes);

  /// The mesh for `world_size` ranks; dp_shard = 0 takes what the other axes leave. Throws ConfigError that
  /// prints the product of axes against world_size when they do not agree.
  static MeshShape fit(const ParallelConfig& parallel, int64_t world_size);

  int64_t size(Axis axis) const { return sizes_[static_cast<size_t>(axis)]; }
  int64_t world_size() const;
  /// Ranks that have sequences of their own: dp_replicate * dp_shard.
  int64_t dp_size() const { return size(Axis::kDpReplicate) * size(Axis::kDpShard); }

  /// The mesh as an engine sees it, in which ranks along cp, which have other tokens of the same sequences,
  /// are ranks along dp_shard: they have the same parameters, which are sharded over them, too, and their
  /// gradients are added up. Ranks keep their numbers.
  MeshShape of_engine() const;

  /// Place of global rank `rank` on each axis, in the order of Axis. Throws LogicError for a rank outside the
  /// mesh.
  Coordinates coordinates(int64_t rank) const;
  /// The global rank at these coordinates, the inverse of coordinates(). Throws LogicError for one outside
  /// its axis.
  int64_t rank(const Coordinates& coordinates) const;
  /// Index of `rank` among the data-parallel ranks, 0 to dp_size()-1.
  int64_t dp_rank(int64_t rank) const;
  /// The global ranks that differ from `rank` only along `axes`, in rising order of their coordinates.
  std::vector<int64_t> group(int64_t rank, const std::vector<Axis>& axes) const;

  std::string to_string() const;  ///< "dp_shard=4 tp=2", only axes above 1; "1 rank"

 private:
  Coordinates sizes_;
};

}  // namespace trireme::plan
