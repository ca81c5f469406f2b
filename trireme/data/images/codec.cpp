#include "trireme/data/images/codec.h"

#include <array>
#include <cstring>

namespace trireme::data {
namespace {

template <size_t kSize>
bool starts_with(std::span<const std::byte> bytes, const std::array<unsigned char, kSize>& mark) {
  return bytes.size() >= kSize && std::memcmp(bytes.data(), mark.data(), kSize) == 0;
}

}  // namespace

Image decode_image(std::span<const std::byte> bytes, const DecodeOptions& options) {
  if (starts_with(bytes, std::to_array<unsigned char>({0xff, 0xd8, 0xff})))
    return decode_jpeg(bytes, options);
  if (starts_with(bytes, std::to_array<unsigned char>({0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'})))
    return decode_png(bytes, options);
  throw BrokenImage(bytes.empty() ? "it is empty" : "it begins neither as JPEG nor as PNG");
}

void drop_colours(Image& image) {
  std::vector<uint8_t>& pixels = image.pixels;
  for (size_t to = 0; 3 * to < pixels.size(); ++to) {
    const uint8_t* rgb = &pixels[3 * to];
    pixels[to] = static_cast<uint8_t>((299 * rgb[0] + 587 * rgb[1] + 114 * rgb[2] + 500) / 1000);
  }
  pixels.resize(pixels.size() / 3);
  image.shape.channels = 1;
}

}  // namespace trireme::data
