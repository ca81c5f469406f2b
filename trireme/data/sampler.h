#pragma once
// Which samples a rank reads at a step: a pure function of (seed, global cursor), so that the order does not
// depend on the number of ranks and a run resumes from one number.
#include <cstdint>
#include <vector>

namespace trireme::data {

/// A permutation of 0..size-1 for (seed, epoch), evaluated at one position without a table: a balanced
/// Feistel network on the next even power of two, walked until it falls into the range (Black and Rogaway
/// 2002).
int64_t permuted(int64_t position, int64_t size, uint64_t seed, int64_t epoch);

struct SamplerOptions {
  int64_t samples = 0;  ///< of the dataset
  uint64_t seed = 0;
  bool shuffle = true;  ///< off for validation
};

/// Samples of global positions [begin, begin + count): position p is sample permuted(p % samples) of epoch
/// p / samples. An optimizer step takes global_batch positions; data-parallel rank r of n takes the r-th of n
/// equal contiguous parts of them.
std::vector<int64_t> sample_indices(const SamplerOptions& options, int64_t begin, int64_t count);

}  // namespace trireme::data
