#pragma once
// Files of image sets, written byte by byte by tests.
#include <cstdint>
#include <initializer_list>
#include <string>

#include "trireme/data/images/image.h"

namespace trireme::testing {

/// Some pixel of image `index`: every place has its own value.
inline uint8_t pattern(int64_t index, int64_t channel, int64_t y, int64_t x) {
  return static_cast<uint8_t>(37 * index + 101 * channel + 7 * y + 3 * x);
}

inline data::Image pattern_image(int64_t index, const data::ImageShape& shape) {
  data::Image image{.shape = shape, .pixels = {}};
  for (int64_t y = 0; y < shape.height; ++y) {
    for (int64_t x = 0; x < shape.width; ++x) {
      for (int64_t channel = 0; channel < shape.channels; ++channel)
        image.pixels.push_back(pattern(index, channel, y, x));
    }
  }
  return image;
}

/// A record of CIFAR: labels, then 3 planes of 32 x 32.
inline std::string cifar_record(int64_t index, std::initializer_list<int> labels) {
  std::string record;
  for (const int label : labels) record.push_back(static_cast<char>(label));
  for (int64_t channel = 0; channel < 3; ++channel) {
    for (int64_t place = 0; place < 32 * 32; ++place)
      record.push_back(static_cast<char>(pattern(index, channel, place / 32, place % 32)));
  }
  return record;
}

/// A header of idx: a magic number and sizes, big-endian.
inline std::string idx_header(uint32_t magic, std::initializer_list<uint32_t> sizes) {
  std::string header;
  const auto put = [&](uint32_t value) {
    for (const int shift : {24, 16, 8, 0}) header.push_back(static_cast<char>(value >> shift & 0xffU));
  };
  put(magic);
  for (const uint32_t size : sizes) put(size);
  return header;
}

/// `count` images of height x width.
inline std::string idx_images(uint32_t count, uint32_t height, uint32_t width) {
  std::string bytes = idx_header(0x803, {count, height, width});
  for (uint32_t index = 0; index < count; ++index) {
    for (uint32_t y = 0; y < height; ++y) {
      for (uint32_t x = 0; x < width; ++x) bytes.push_back(static_cast<char>(pattern(index, 0, y, x)));
    }
  }
  return bytes;
}

inline std::string idx_labels(std::initializer_list<int> labels) {
  std::string bytes = idx_header(0x801, {static_cast<uint32_t>(labels.size())});
  for (const int label : labels) bytes.push_back(static_cast<char>(label));
  return bytes;
}

}  // namespace trireme::testing
