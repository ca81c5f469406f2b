#pragma once
// Ten digits rendered from fonts, in the files of CIFAR-10 or MNIST: images that train anywhere, for whoever
// has none yet. They have the form of those sets and none of their images.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/data/images/image.h"

namespace trireme::data {

/// The file that make_digits() writes last into its folder: it says what the images are made from.
inline constexpr const char* kDigitsRecord = "digits.json";

enum class DigitFormat {
  kCifar10,  ///< 3 x 32 x 32, coloured, data_batch_1.bin to data_batch_5.bin and test_batch.bin
  kMnist     ///< 1 x 28 x 28, white on black, train-images-idx3-ubyte and its kin
};

struct DigitOptions {
  std::string folder = {};  ///< made where there is none
  DigitFormat format = DigitFormat::kCifar10;
  int64_t train = 50000, test = 10000;
  uint64_t seed = 0;
  int64_t threads = 1;
  std::vector<std::string> fonts = {};  ///< files; of those without all ten digits none is used
  /// Told of images that are done. What it throws ends the work.
  std::function<void(int64_t done, int64_t total)> on_progress = {};
};

struct MadeDigits {
  int64_t train = 0, test = 0;
  std::vector<std::string> fonts;  ///< "DejaVu Sans Bold", those that were drawn from
  std::string digest;              ///< XXH3-64 over all files, in the order in which they are listed
  bool was_there = false;          ///< made earlier, from the same options and fonts
};

/// TrueType and OpenType files in a folder and below it, sorted by file name.
std::vector<std::string> fonts_below(const std::string& folder);
/// The font files of this system.
std::vector<std::string> system_fonts();

/// Writes the files and, last, digits.json, which says what they are made from. An image is a pure function
/// of (seed, split, place, fonts), whatever the threads; other fonts, or another version of FreeType, give
/// other bytes. Each class is drawn equally often. Throws ConfigError when the folder holds something else,
/// when no font has digits or counts are too small, and EnvironmentError when files cannot be written or this
/// build has no FreeType.
MadeDigits make_digits(const DigitOptions& options);

/// Draws digits with fonts that are opened once. Not thread-safe: each thread has its own.
class DigitPainter {
 public:
  explicit DigitPainter(const std::vector<std::string>& files);
  ~DigitPainter();

  /// "DejaVu Sans Bold" of each file that has all ten digits.
  const std::vector<std::string>& fonts() const;
  /// The files of these fonts.
  const std::vector<std::string>& files() const;
  Image draw(int64_t digit, DigitFormat format, SampleDraws& draws);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme::data
