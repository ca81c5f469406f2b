#pragma once
// The costs of collectives, as formulas: the communicator counts with them, `bench` turns them into bus
// bandwidth.
#include <cstdint>
#include <string_view>

#include "trireme/plan/choices.h"

namespace trireme::plan {

enum class Collective {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kSend,
  kRecv,
  kBarrier
};
template <>
inline constexpr auto kNames<Collective> =
    std::to_array<std::string_view>({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
                                     "reduce", "gather", "scatter", "send", "recv", "barrier"});

/// Bytes that one of `ranks` ranks sends on the wire, or receives there: the one that has most to do. `bytes`
/// is S of nccl-tests: the whole buffer of a rank, that is the output of an all-gather or a gather, the input
/// of a reduce-scatter or a scatter. Ring algorithms: all-reduce 2S(n-1)/n; all-gather, reduce-scatter,
/// all-to-all, gather, scatter S(n-1)/n; broadcast, reduce and send S; receive and barrier 0.
int64_t wire_bytes(Collective collective, int64_t bytes, int64_t ranks);

/// Communication steps that follow each other: 2(n-1), n-1, 1.
int64_t steps(Collective collective, int64_t ranks);

}  // namespace trireme::plan
