#include "trireme/data/sampler.h"

#include <bit>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme::data {
namespace {

constexpr uint64_t kRounds =
    8;  // four make a pseudo-random permutation (Luby and Rackoff 1988); small halves want more

/// One permutation of 0..4^half_bits - 1.
uint64_t feistel(uint64_t value, int half_bits, uint64_t key) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = value >> half_bits;
  uint64_t right = value & mask;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint64_t next = left ^ (mix64(mix64(key, round), right) & mask);
    left = right;
    right = next;
  }
  return left << half_bits | right;
}

}  // namespace

int64_t permuted(int64_t position, int64_t size, uint64_t seed, int64_t epoch) {
  TRIREME_CHECK(position >= 0 && position < size, "[data.sampler] there is no position {} among {}", position,
                size);
  const auto limit = static_cast<uint64_t>(size);
  const int half_bits = (std::bit_width(limit - 1) + 1) / 2;
  const uint64_t key = mix64(seed, static_cast<uint64_t>(epoch));
  auto value = static_cast<uint64_t>(position);
  do {
    value = feistel(value, half_bits, key);
  } while (value >= limit);
  return static_cast<int64_t>(value);
}

std::vector<int64_t> sample_indices(const SamplerOptions& options, int64_t begin, int64_t count) {
  TRIREME_CHECK(options.samples >= 1 && begin >= 0 && count >= 0,
                "[data.sampler] samples={} must be at least 1, begin={} and count={} at least 0",
                options.samples, begin, count);
  std::vector<int64_t> indices;
  indices.reserve(static_cast<size_t>(count));
  for (int64_t position = begin; position < begin + count; ++position) {
    const int64_t within = position % options.samples;
    const int64_t epoch = position / options.samples;
    indices.push_back(options.shuffle ? permuted(within, options.samples, options.seed, epoch) : within);
  }
  return indices;
}

}  // namespace trireme::data
