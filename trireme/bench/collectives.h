#pragma once
// How long our collectives and the backend's take on the ranks of a world, side by side, and messages between
// each two of them.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace trireme::comm {
class Group;
class World;
}  // namespace trireme::comm

namespace trireme::bench {

struct CollectiveTimes {
  std::string operation = {};         ///< "reduce_scatter"
  std::string by = {};                ///< what moves the bytes
  int64_t mib = 0;                    ///< of the whole bf16 tensor
  int64_t wire_bytes = 0;             ///< that a rank receives; of gather and scatter, that root moves
  bool in_place = false;              ///< the result lies where the input was
  std::vector<double> calls_ms = {};  ///< one mean of several calls a round, of the slowest rank
  int64_t wrong = 0;  ///< elements of all ranks that differ from what they should be, behind the last round

  /// Whether only in_place may tell the two apart.
  bool is_same_way(const CollectiveTimes& other) const {
    return mib == other.mib && operation == other.operation && by == other.by;
  }
  double median_ms() const;
  /// The bus bandwidth of nccl-tests.
  double gb_per_s() const { return static_cast<double>(wire_bytes) / median_ms() / 1e6; }
  /// Their algorithm bandwidth: the bytes of the whole tensor over the median time.
  double tensor_gb_per_s() const;
};

/// Messages from one rank to another while all others wait.
struct PairTimes {
  int64_t from = 0, to = 0;
  double latency_us = 0.0;  ///< of 4 bytes, one message behind the other
  double gb_per_s = 0.0;    ///< of messages of the size that was asked for
};

/// Collectives of bf16 tensors of so many MiB, every way that this world has, out of place and in place where
/// the group has both, one after the other; each is checked once. Each round
/// times all of them once, so that a slow moment of the machine falls on all. `on_round` is told the rounds
/// that are done. Collective over the world; the host waits.
std::vector<CollectiveTimes> time_collectives(const std::shared_ptr<comm::World>& world,
                                              const std::vector<int64_t>& mib, int64_t rounds,
                                              const std::function<void(int64_t)>& on_round = {});

/// Elements of the `output` of all ranks that differ from what each has `expected`, on every rank.
/// Collective.
int64_t count_wrong(comm::Group& group, const at::Tensor& output, const at::Tensor& expected);

/// Every ordered pair of ranks, with messages of `mib` MiB: medians of the rounds, on every rank. Collective
/// over the world; the host waits.
std::vector<PairTimes> time_pairs(const std::shared_ptr<comm::World>& world, int64_t mib, int64_t rounds);

}  // namespace trireme::bench
