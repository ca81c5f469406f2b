#pragma once
// XXH3-64, the checksum of every file we write, and a counter-based random generator built on the same idea:
// a pure function of its inputs, so that any rank can compute any element.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace trireme {

/// XXH3-64 of `size` bytes.
uint64_t xxh3(const void* data, size_t size, uint64_t seed = 0);
inline uint64_t xxh3(std::string_view text, uint64_t seed = 0) {
  return xxh3(text.data(), text.size(), seed);
}

/// 16 lower-case hex digits.
std::string hex64(uint64_t value);

/// XXH3-64 over pieces that arrive one after another; equal to xxh3() of their concatenation.
class StreamingHash {
 public:
  StreamingHash();
  ~StreamingHash();
  StreamingHash(const StreamingHash&) = delete;
  StreamingHash& operator=(const StreamingHash&) = delete;
  void update(const void* data, size_t size);
  uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A well-mixed 64-bit value for (key, counter): SplitMix64's finaliser over a Weyl sequence (Steele et al.
/// 2014).
constexpr uint64_t mix64(uint64_t key, uint64_t counter) {
  uint64_t z = key + (counter + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace trireme
