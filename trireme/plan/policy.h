#pragma once
// Data-parallel policies as rows of one table: what each one shards over which axis, and when parameters are
// gathered and freed. The engine reads these fields and nothing else.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "trireme/plan/choices.h"
#include "trireme/plan/mesh_shape.h"

namespace trireme::plan {

struct Policy {
  PolicyName name;        ///< parallel.policy
  Sharding sharding;      ///< parallel.sharding where a policy has several rows, else kAuto
  bool shard_optimizer;   ///< each rank updates and keeps state for its range only
  bool shard_gradients;   ///< full gradients are freed once reduced
  bool shard_parameters;  ///< full parameters are gathered for use, and freed after backward
  /// Over how many neighbouring ranks parameters are sharded between forward and backward: kSameRanks, 1
  /// (they stay gathered), or a divisor of the shard ranks.
  int64_t reshard_after_forward;
  bool hybrid;  ///< sharded along dp_shard and replicated along dp_replicate; else over all data-parallel
                ///< ranks
  std::string_view summary;

  static constexpr int64_t kSameRanks = 0;
  /// "fsdp:hybrid_shard"; find_policy() takes it back.
  std::string label() const;
  /// Over how many of the data-parallel ranks state is sharded.
  int64_t shard_ranks(const MeshShape& mesh) const {
    return hybrid ? mesh.size(Axis::kDpShard) : mesh.dp_size();
  }
};

std::span<const Policy> policies();

/// The row of a label as a user writes it. A name alone means its first row. Throws ConfigError with the
/// nearest name when no row has that label.
const Policy& find_policy(std::string_view label);

/// The row of a name and, for fsdp, of `sharding`; kAuto means the first row. Throws LogicError where there
/// is none.
const Policy& find_policy(PolicyName name, Sharding sharding = Sharding::kAuto);

/// The row that a config asks for, before its mesh is known. parallel.sharding=auto is hybrid_shard where
/// parallel.dp_replicate is above 1, else full_shard; policies with one row ignore parallel.sharding.
const Policy& row_of(const ParallelConfig& parallel);

/// The row that a config asks for, with its parallel.reshard_after_forward. parallel.sharding=auto is
/// hybrid_shard on a mesh with replicas, else full_shard. Ranks along cp count as ranks along dp_shard.
/// Throws ConfigError when row and mesh do not fit.
Policy resolve_policy(const ParallelConfig& parallel, const MeshShape& mesh);

/// Why `hook` cannot be combined with `policy`, and what to do instead; empty: it can.
std::string_view hook_obstacle(const Policy& policy, CommHook hook);

}  // namespace trireme::plan
