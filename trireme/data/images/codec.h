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

/// What can be wrong with one file of many, told without its name.
class BrokenImage : public std::exception {
 public:
  explicit BrokenImage(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

/// More pixels than a photograph has; a header that says so would only take memory.
inline constexpr int64_t kMostPixels = int64_t{1} << 28;

struct DecodeOptions {
  int64_t channels = 3;  ///< 1 (luma) or 3 (RGB); transparency is dropped
  /// JPEG files may come smaller, by a power of two that leaves both sides at least so long; 0: as they are.
  int64_t least_side = 0;
  /// Called once; empty: all of it. Of JPEG files only the part and what lies above it are decoded.
  PartChooser part = {};
};

/// By its first bytes. Throws BrokenImage when it is neither JPEG nor PNG, damaged where it is decoded, cut
/// off or too large, and EnvironmentError when this build lacks the library.
Image decode_image(std::span<const std::byte> bytes, const DecodeOptions& options = {});

Image decode_jpeg(std::span<const std::byte> bytes, const DecodeOptions& options);
/// The whole picture, whatever part is asked for.
Image decode_png(std::span<const std::byte> bytes, const DecodeOptions& options);

/// RGB to luma as ITU-R BT.601 weighs it; equal channels stay what they are.
void drop_colours(Image& image);

/// 1 or 3 channels, 8 bits.
std::string encode_png(const Image& image);
/// `quality` 1 to 100; `chroma` rows and columns share a sample of colour, 1 or, as cameras do, 2.
std::string encode_jpeg(const Image& image, int quality, int chroma = 1);

}  // namespace trireme::data
