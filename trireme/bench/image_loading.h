#pragma once
// How fast images are read and prepared, beside the decoder alone.
#include <cstdint>
#include <string>
#include <vector>

namespace trireme::bench {

/// Images a second of processor time, by round.
struct ImageRates {
  std::string name;
  std::vector<double> alone;  ///< the decoder's
  std::vector<double> whole;  ///< of read, decode, random resized crop, flip, normalise, into a batch
  double mean_bytes = 0.0;    ///< of a file
};

struct ImageRun {
  std::string path = {};  ///< a data set; empty: JPEG files of three sizes, made for it
  int64_t side = 224, images = 200, rounds = 5;  ///< side: of what is cropped
};

/// In this process alone, one thread at work. Throws EnvironmentError for a full disk, DataError for a data
/// set that cannot be read.
std::vector<ImageRates> measure_image_loading(const ImageRun& run);

}  // namespace trireme::bench
