#include "trireme/plan/mesh_shape.h"

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

std::string product_text(const MeshShape::Coordinates& sizes) {
  std::vector<std::string> factors;
  for (size_t axis = 0; axis < kAxes; ++axis)
    factors.push_back(fmt::format("{}={}", kAxisNames[axis], sizes[axis]));
  return join(factors, " x ");
}

int64_t product(const MeshShape::Coordinates& sizes) {
  int64_t result = 1;
  for (const int64_t size : sizes) result *= size;
  return result;
}

void check_sizes(const MeshShape::Coordinates& sizes) {
  for (size_t axis = 0; axis < kAxes; ++axis) {
    if (sizes[axis] >= 1) continue;
    throw ConfigError("[plan.mesh] parallel.{}={} is not a valid size; set it to 1 or more", kAxisNames[axis],
                      sizes[axis]);
  }
}

/// The size of dp_shard when it is to take what the other axes (whose product is `others`) leave.
int64_t remaining_ranks(const MeshShape::Coordinates& sizes, int64_t others, int64_t world_size) {
  if (world_size % others == 0) return world_size / others;
  throw ConfigError(
      "[plan.mesh] {} = {} (without dp_shard) does not divide the world size {}; start a multiple of {} "
      "ranks or make an axis smaller",
      product_text(sizes), others, world_size, others);
}

}  // namespace

MeshShape::MeshShape(const Coordinates& sizes) : sizes_(sizes) {
  check_sizes(sizes);
}

MeshShape MeshShape::fit(const ParallelConfig& parallel, int64_t world_size) {
  TRIREME_CHECK(world_size >= 1, "[plan.mesh] world_size={} must be at least 1", world_size);
  constexpr auto kShard = static_cast<size_t>(Axis::kDpShard);
  Coordinates sizes = {parallel.pp, parallel.dp_replicate, parallel.dp_shard, parallel.cp, parallel.tp};
  const bool fill = sizes[kShard] == 0;
  if (fill) sizes[kShard] = 1;
  check_sizes(sizes);
  if (fill) sizes[kShard] = remaining_ranks(sizes, product(sizes), world_size);
  if (product(sizes) != world_size) {
    throw ConfigError(
        "[plan.mesh] {} = {} ranks, but the world has {}; start {} ranks or set parallel.dp_shard=0, which "
        "takes the ranks that the other axes leave",
        product_text(sizes), product(sizes), world_size, product(sizes));
  }
  return MeshShape(sizes);
}

MeshShape MeshShape::of_engine() const {
  Coordinates sizes = sizes_;
  sizes[static_cast<size_t>(Axis::kDpShard)] *= size(Axis::kCp);
  sizes[static_cast<size_t>(Axis::kCp)] = 1;
  return MeshShape(sizes);
}

int64_t MeshShape::world_size() const {
  return product(sizes_);
}

MeshShape::Coordinates MeshShape::coordinates(int64_t rank) const {
  TRIREME_CHECK(rank >= 0 && rank < world_size(), "[plan.mesh] rank {} is outside a mesh of {} ranks", rank,
                world_size());
  Coordinates result{};
  for (size_t axis = kAxes; axis-- > 0;) {
    result[axis] = rank % sizes_[axis];
    rank /= sizes_[axis];
  }
  return result;
}

int64_t MeshShape::rank(const Coordinates& coordinates) const {
  int64_t result = 0;
  for (size_t axis = 0; axis < kAxes; ++axis) {
    TRIREME_CHECK(coordinates[axis] >= 0 && coordinates[axis] < sizes_[axis],
                  "[plan.mesh] {}={} is outside an axis of {}", kAxisNames[axis], coordinates[axis],
                  sizes_[axis]);
    result = result * sizes_[axis] + coordinates[axis];
  }
  return result;
}

int64_t MeshShape::dp_rank(int64_t rank) const {
  const Coordinates at = coordinates(rank);
  return at[static_cast<size_t>(Axis::kDpReplicate)] * size(Axis::kDpShard) +
         at[static_cast<size_t>(Axis::kDpShard)];
}

std::vector<int64_t> MeshShape::group(int64_t rank, const std::vector<Axis>& axes) const {
  const Coordinates mine = coordinates(rank);
  std::vector<int64_t> members;
  for (int64_t other = 0; other < world_size(); ++other) {
    Coordinates theirs = coordinates(other);
    for (const Axis axis : axes) theirs[static_cast<size_t>(axis)] = mine[static_cast<size_t>(axis)];
    if (theirs == mine) members.push_back(other);
  }
  return members;
}

std::string MeshShape::to_string() const {
  std::vector<std::string> parts;
  for (size_t axis = 0; axis < kAxes; ++axis) {
    if (sizes_[axis] > 1) parts.push_back(fmt::format("{}={}", kAxisNames[axis], sizes_[axis]));
  }
  return parts.empty() ? "1 rank" : join(parts, " ");
}

}  // namespace trireme::plan
