#pragma once
// JPEG and PNG files, by libjpeg-turbo and libpng.
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <utility>

#include "trireme/data/images/image.h"

namespace trireme::data {

/// One image file of many cannot be read; what() gives the reason without the file's name.
class BrokenImage : public std::exception {
 public:
  explicit BrokenImage(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

/// Files with more pixels are refused: no photograph has so many, and decoding would only take memory.
inline constexpr int64_t kMostPixels = int64_t{1} << 28;

struct DecodeOptions {
  int64_t channels = 3;  ///< 1 (luma) or 3 (RGB); transparency is dropped
  /// JPEG files may be decoded at 1/2, 1/4 or 1/8 of their size, as long as both sides keep this many pixels;
  /// 0: at full size.
  int64_t least_side = 0;
  /// Chooses the part to return, called once with the decoded shape; empty: the whole picture. Of JPEG files
  /// only the part and what lies above it are decoded.
  PartChooser part = {};
};

/// Whether a file with these first bytes is a JPEG or PNG.
bool is_jpeg_or_png(std::span<const std::byte> bytes);

/// Decodes a JPEG or PNG file, told apart by its first bytes. Throws BrokenImage when it is neither, damaged
/// where it is decoded, cut off or too large, and EnvironmentError when this build lacks the library.
Image decode_image(std::span<const std::byte> bytes, const DecodeOptions& options = {});

Image decode_jpeg(std::span<const std::byte> bytes, const DecodeOptions& options);
/// Decodes the whole picture: `options.part` is ignored.
Image decode_png(std::span<const std::byte> bytes, const DecodeOptions& options);

/// Turns RGB into luma with the weights of ITU-R BT.601, in place; a grey pixel keeps its value.
void drop_colours(Image& image);

/// The bytes of a PNG file with 1 or 3 channels of 8 bits.
std::string encode_png(const Image& image);
/// The bytes of a JPEG file. `quality`: 1 to 100. A sample of colour stands for `chroma` x `chroma` pixels:
/// 1, or 2 as cameras do.
std::string encode_jpeg(const Image& image, int quality, int chroma = 1);

}  // namespace trireme::data
