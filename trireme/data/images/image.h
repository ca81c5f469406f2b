#pragma once
// A picture as bytes, and the numbers that its augmentation draws.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/base/hash.h"

namespace trireme::data {

struct ImageShape {
  int64_t channels = 0, height = 0, width = 0;
  bool operator==(const ImageShape&) const = default;
  /// "3 x 32 x 32"
  std::string to_string() const {
    return std::to_string(channels) + " x " + std::to_string(height) + " x " + std::to_string(width);
  }
};

struct Image {
  ImageShape shape;
  std::vector<uint8_t> pixels;  ///< (height, width, channels)
};

struct ImagePart {
  int64_t top = 0, left = 0, height = 0, width = 0;
  bool operator==(const ImagePart&) const = default;
};

inline ImagePart all_of(const ImageShape& shape) {
  return {.top = 0, .left = 0, .height = shape.height, .width = shape.width};
}

/// Chooses a part of a picture from its shape after decoding.
using PartChooser = std::function<ImagePart(const ImageShape&)>;

/// Returns only `part` of the image.
Image cut(Image image, const ImagePart& part);

/// Random numbers of one sample in one epoch: a pure function of (seed, epoch, sample), so that no rank and
/// no thread that prepares the sample matters.
class SampleDraws {
 public:
  SampleDraws(uint64_t seed, int64_t epoch, int64_t sample)
      : key_(mix64(mix64(seed ^ kStream, static_cast<uint64_t>(epoch)), static_cast<uint64_t>(sample))) {}

  uint64_t bits() { return mix64(key_, counter_++); }
  /// In [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1.0p-53; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  /// In 0..limit-1; `limit` far below 2^63.
  int64_t below(int64_t limit) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(limit)); }

 private:
  static constexpr uint64_t kStream = 0x696d61676573ULL;  // apart from the sampler, which has the same seed
  uint64_t key_;
  uint64_t counter_ = 0;
};

}  // namespace trireme::data
