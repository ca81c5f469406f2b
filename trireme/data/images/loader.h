#pragma once
// Batches of images for one data-parallel rank, prepared by background threads a few steps ahead. What a row
// holds depends on the seed and its place in the epoch alone: on any number of ranks and threads a step sees
// the same numbers.
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <set>

#include "trireme/data/batch.h"
#include "trireme/data/images/set.h"
#include "trireme/data/images/transform.h"

namespace trireme::data {

/// What follows the last whole global batch of an epoch.
enum class EpochEnd {
  kShort,  ///< a step with the rows that are left
  kRunOn   ///< a step with those and the first rows of the next epoch
};

/// Pictures of a set that could not be read, each told and counted once, whichever loaders meet it.
/// Thread-safe.
class BrokenImages {
 public:
  /// More than `most` of them are an error; 0: a hundredth of all, at least 8.
  explicit BrokenImages(std::shared_ptr<const ImageSet> images, int64_t most = 0);

  /// Throws DataError when there are too many.
  void note(int64_t index, const std::exception& error);
  int64_t count() const;

 private:
  const std::shared_ptr<const ImageSet> images_;
  const int64_t most_;
  mutable std::mutex mutex_;
  std::set<int64_t> indices_;
};

struct ImageLoaderOptions {
  uint64_t seed = 0;
  bool shuffle = true;  ///< off for validation
  EpochEnd epoch_end = EpochEnd::kShort;
  ImageTransform transform;
  double label_smoothing = 0.0;  ///< share of the target that all classes divide among them
  double mixup = 0.0;            ///< alpha of the mixture with another picture; 0: none; at most 1
  /// Training takes the next picture instead of one that cannot be read; else its row is left out.
  bool replace_broken = true;
  std::shared_ptr<BrokenImages> broken = {};  ///< of this rank's loaders of the images; none: its own
  int64_t global_batch = 0;
  int64_t micro_batch = 0;
  int64_t dp_rank = 0;
  int64_t dp_size = 1;
  int64_t first_step = 0;  ///< of the run; each epoch has steps_per_epoch()
  int64_t prefetch = 4;    ///< micro-batches held ready
  int64_t threads = 1;
  bool pin_memory = false;
};

/// Of ceil(images / global_batch) steps with EpochEnd::kShort; with kRunOn epochs end within steps.
int64_t steps_per_epoch(int64_t images, int64_t global_batch);

/// Yields global_batch / dp_size / micro_batch micro-batches per step, for ever, and of a short step only as
/// many as its rows need (Batch::step_passes), the same number on all ranks; its rows are divided among ranks
/// and their micro-batches as evenly as can be, so that one may have none. An error of a thread is thrown by
/// the call of next() whose batch it concerns, and by all later ones.
class ImageLoader {
 public:
  ImageLoader(std::shared_ptr<const ImageSet> images, const ImageLoaderOptions& options);
  ~ImageLoader();
  Batch next();
  /// Pictures that this loader, and those that share its BrokenImages, could not read so far.
  int64_t broken() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Mean and standard deviation of pixels in [0, 1] by channel, over at most `most` images at equal distances.
struct PixelStatistics {
  std::vector<double> mean, deviation;
  int64_t images = 0;  ///< that could be read
};
PixelStatistics measure_pixels(const ImageSet& images, int64_t most);

}  // namespace trireme::data
