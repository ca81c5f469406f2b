#include "trireme/data/token_samples.h"

#include <algorithm>

#include "trireme/data/sampler.h"

namespace trireme::data {

void TokenSamples::read_targets(int64_t index, std::span<int64_t> tokens, std::span<int64_t> targets) const {
  read(index, tokens);
  std::copy(tokens.begin() + 1, tokens.end(), targets.begin());
}

std::vector<int64_t> TokenSamples::order(int64_t begin, int64_t count, uint64_t seed) const {
  return sample_indices({.samples = size(), .seed = seed}, begin, count);
}

}  // namespace trireme::data
