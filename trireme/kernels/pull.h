#pragma once
// Collectives of GPUs that can read each other's memory (NVLink): every rank pulls what it needs from where
// it lies in its peers, without staging. A rank's block b posts to block b of every peer that its input is
// ready, waits for theirs, pulls, and posts that it is done; it ends when all peers are done with this rank's
// memory. So blocks need no agreement among themselves, and a kernel that has ended means that the input may
// change.
#include <cstdint>

namespace trireme::kernels {

inline constexpr int kPullRanks = 8;     ///< most that a group may have
inline constexpr int kPullBlocks = 32;   ///< most that a kernel may have
inline constexpr int kPullChannels = 2;  ///< sequences of calls that may be under way at once

/// The flags that peers write to a rank, in the memory of its GPU. All zero at first.
struct PullBox {
  uint64_t ready[kPullChannels][kPullBlocks][kPullRanks];  ///< round << 32 | what the operation is, by sender
  uint64_t done[kPullChannels][kPullBlocks][kPullRanks];   ///< round, by sender
};

/// State of pulls, in host memory that the GPU can reach.
struct PullState {
  uint32_t stop;       ///< the host sets it: kernels that wait give up
  uint32_t odd_rank;   ///< 1 + a group rank that is in another operation than this rank; 0: none
  uint32_t odd_round;  ///< the round in which that was seen
  uint32_t odd_channel;
};

/// One collective call on one rank.
struct PullCall {
  int rank = 0, size = 0, channel = 0;
  uint32_t round = 0;                   ///< of the channel, from 1
  uint32_t operation = 0;               ///< equal on all ranks, or they are in different operations
  PullBox* boxes[kPullRanks] = {};      ///< of every rank, as mapped here
  const void* inputs[kPullRanks] = {};  ///< of every rank, as mapped here
  PullState* state = nullptr;
};

// All return the launch's cudaError_t; work is enqueued on `stream` (a cudaStream_t).

/// output (count) fp32 = the sum over ranks, in the order of tree_sum.h, of this rank's part of the inputs
/// (size * count) fp32 or bf16. `output` may be this rank's part of its own input.
int pull_sum(float* output, int64_t count, bool bf16, const PullCall& call, void* stream);
/// output (size * bytes) = the inputs (bytes) in the order of ranks.
int pull_gather(void* output, int64_t bytes, const PullCall& call, void* stream);
/// The begin and the end of a call whose bytes copy engines move in between.
int pull_begin(const PullCall& call, void* stream);
int pull_end(const PullCall& call, void* stream);

}  // namespace trireme::kernels
