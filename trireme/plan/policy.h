#pragma once
// Data-parallel policies as rows of one table: what each one shards, and when parameters are gathered and
// freed. The engine reads these flags and nothing else.
#include <span>
#include <string>
#include <string_view>

namespace trireme::plan {

struct Policy {
  std::string_view name;
  bool shard_optimizer;        ///< each rank updates and keeps state for its range only
  bool shard_gradients;        ///< full gradients are freed once reduced
  bool shard_parameters;       ///< full parameters are gathered for use
  bool reshard_after_forward;  ///< and freed after forward, to be gathered again for backward
  std::string_view summary;
};

std::span<const Policy> policies();

/// Throws ConfigError with the nearest name when there is none of that name.
const Policy& find_policy(std::string_view name);

}  // namespace trireme::plan
