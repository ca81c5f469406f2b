#include "trireme/base/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <fmt/format.h>

namespace trireme {

uint64_t xxh3(const void* data, size_t size, uint64_t seed) {
  return XXH3_64bits_withSeed(data, size, seed);
}

std::string hex64(uint64_t value) {
  return fmt::format("{:016x}", value);
}

struct StreamingHash::State {
  XXH3_state_t state;
};

StreamingHash::StreamingHash() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->state);
}
StreamingHash::~StreamingHash() = default;
void StreamingHash::update(const void* data, size_t size) {
  XXH3_64bits_update(&state_->state, data, size);
}
uint64_t StreamingHash::digest() const {
  return XXH3_64bits_digest(&state_->state);
}

}  // namespace trireme
