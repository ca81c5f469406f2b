#pragma once
// How a classifier does on the held-out images: its confusion matrix and its worst mistakes.
#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

struct Picture {
  int64_t width = 0, height = 0;
  int64_t channels = 0;         ///< 1 (luma) or 3 (RGB)
  std::vector<uint8_t> pixels;  ///< (height, width, channels)
};

struct Classification {
  /// An image that was taken for another class.
  struct Mistake {
    int64_t sample = 0;              ///< index among the held-out images
    int64_t truth = 0, guess = 0;    ///< indices of classes
    double loss = 0.0;               ///< in nats: -log(truth_probability)
    double guess_probability = 0.0;  ///< of `guess`, the likeliest class
    double truth_probability = 0.0;
    std::string name = {};  ///< a file, or a place in one
    Picture picture = {};   ///< as the model saw it; without pixels where it could not be read again
  };

  int64_t step = 0;                  ///< optimizer steps that the model had made
  std::vector<std::string> classes;  ///< names
  /// How many images have each (true class, predicted class), a row for each true class. Empty when there are
  /// more classes than a matrix is kept for.
  std::vector<int64_t> confusion;
  int64_t images = 0, right = 0;  ///< images validated, and how many were classified right
  int64_t not_finite = 0;         ///< of `images`: logits were not finite; in no row, and no Mistake
  std::vector<Mistake> worst;     ///< the mistakes with the largest losses, largest first
};

}  // namespace trireme
