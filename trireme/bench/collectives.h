#pragma once
// How long our collectives and the backend's take on the ranks of a world, side by side.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme::comm {
class World;
}

namespace trireme::bench {

struct CollectiveTimes {
  std::string operation = {};         ///< "reduce_scatter" or "all_gather"
  std::string by = {};                ///< what moves the bytes
  int64_t mib = 0;                    ///< of the whole bf16 tensor
  int64_t wire_bytes = 0;             ///< that a rank receives
  std::vector<double> calls_ms = {};  ///< one mean of several calls a round

  double median_ms() const;
  double gb_per_s() const { return static_cast<double>(wire_bytes) / median_ms() / 1e6; }
};

/// Reduce-scatters and all-gathers of bf16 tensors of so many MiB, every way that this world has. Each round
/// times all of them once, so that a slow moment of the machine falls on all. `on_round` is told the rounds
/// that are done. Collective over the world; the host waits.
std::vector<CollectiveTimes> time_collectives(const std::shared_ptr<comm::World>& world,
                                              const std::vector<int64_t>& mib, int64_t rounds,
                                              const std::function<void(int64_t)>& on_round = {});

}  // namespace trireme::bench
