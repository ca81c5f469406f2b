#include <png.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/data/images/codec.h"

namespace trireme::data {
namespace {

/// libpng's simplified face: it leaves no state behind but this.
class Png {
 public:
  Png() { state.version = PNG_IMAGE_VERSION; }
  ~Png() { png_image_free(&state); }
  Png(const Png&) = delete;
  Png& operator=(const Png&) = delete;
  png_image state = {};
};

}  // namespace

Image decode_png(std::span<const std::byte> bytes, const DecodeOptions& options) {
  Png png;
  if (png_image_begin_read_from_memory(&png.state, bytes.data(), bytes.size()) == 0)
    throw BrokenImage(png.state.message);
  if (static_cast<int64_t>(png.state.width) * png.state.height > kMostPixels) {
    throw BrokenImage(fmt::format("{} x {} pixels are too many", png.state.width, png.state.height));
  }
  // Treats 16 bits as 8 bits: without a gamma in the file libpng would take 16 bits for linear light.
  png.state.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
  // With transparency, so that it is dropped here and not mixed with a background by libpng.
  png.state.format = PNG_FORMAT_RGBA;
  std::vector<uint8_t> raw(PNG_IMAGE_SIZE(png.state));
  if (png_image_finish_read(&png.state, nullptr, raw.data(), 0, nullptr) == 0)
    throw BrokenImage(png.state.message);
  Image image{.shape = {.channels = 3, .height = png.state.height, .width = png.state.width},
              .pixels = std::vector<uint8_t>(raw.size() / 4 * 3)};
  for (size_t from = 0, to = 0; from < raw.size(); from += 4, to += 3)
    std::copy_n(&raw[from], 3, &image.pixels[to]);
  if (options.channels == 1) drop_colours(image);
  return image;
}

std::string encode_png(const Image& image) {
  Png png;
  png.state.width = static_cast<png_uint_32>(image.shape.width);
  png.state.height = static_cast<png_uint_32>(image.shape.height);
  png.state.format = image.shape.channels == 1 ? PNG_FORMAT_GRAY : PNG_FORMAT_RGB;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(png.state);
  std::string bytes(size, '\0');
  const int done =
      png_image_write_to_memory(&png.state, bytes.data(), &size, 0, image.pixels.data(), 0, nullptr);
  TRIREME_CHECK(done != 0, "[data.png] {}", png.state.message);
  bytes.resize(size);
  return bytes;
}

}  // namespace trireme::data
