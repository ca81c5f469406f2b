#include "trireme/data/images/codec.h"

#include <array>
#include <cstring>

namespace trireme::data {
namespace {

template <size_t kSize>
bool starts_with(std::span<const std::byte> bytes, const std::array<unsigned char, kSize>& mark) {
  return bytes.size() >= kSize && std::memcmp(bytes.data(), mark.data(), kSize) == 0;
}

bool is_jpeg(std::span<const std::byte> bytes) {
  return starts_with(bytes, std::to_array<unsigned char>({0xff, 0xd8, 0xff}));
}

bool is_png(std::span<const std::byte> bytes) {
  return starts_with(bytes, std::to_array<unsigned char>({0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'}));
}

Image decode_png_part(std::span<const std::byte> bytes, const DecodeOptions& options) {
  Image image = decode_png(bytes, options);
  if (!options.part) return image;
  const ImagePart part = options.part(image.shape);
  return cut(std::move(image), part);
}

}  // namespace

bool is_jpeg_or_png(std::span<const std::byte> bytes) {
  return is_jpeg(bytes) || is_png(bytes);
}

Image decode_image(std::span<const std::byte> bytes, const DecodeOptions& options) {
  if (is_jpeg(bytes)) return decode_jpeg(bytes, options);
  if (is_png(bytes)) return decode_png_part(bytes, options);
  throw BrokenImage(bytes.empty() ? "it is empty" : "it is neither a JPEG nor a PNG");
}

Image cut(Image image, const ImagePart& part) {
  if (part == all_of(image.shape)) return image;
  const int64_t channels = image.shape.channels, row = part.width * channels;
  Image out{.shape = {.channels = channels, .height = part.height, .width = part.width}, .pixels = {}};
  out.pixels.reserve(static_cast<size_t>(part.height * row));
  for (int64_t y = 0; y < part.height; ++y) {
    const auto from = image.pixels.begin() + ((part.top + y) * image.shape.width + part.left) * channels;
    out.pixels.insert(out.pixels.end(), from, from + row);
  }
  return out;
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
