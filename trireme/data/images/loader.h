#pragma once
// Batches of images for one data-parallel rank, prepared by background threads a few steps ahead. The
// contents of a row depend only on the seed and the row's place in the epoch: a step sees the same numbers on
// any number of ranks and threads.
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <set>

#include "trireme/data/batch.h"
#include "trireme/data/images/set.h"
#include "trireme/data/images/transform.h"

namespace trireme::data {

/// The step that follows the last whole global batch of an epoch.
enum class EpochEnd {
  kShort,  ///< a step with the rows that are left
  kRunOn   ///< a step with those and the first rows of the next epoch
};

/// The pictures of a set that could not be read, each counted once, whichever loaders meet it. The first few
/// are logged. Thread-safe.
class BrokenImages {
 public:
  /// note() throws once there are more than `most`; 0: a hundredth of the set, at least 8.
  explicit BrokenImages(std::shared_ptr<const ImageSet> images, int64_t most = 0);

  /// Picture `index` could not be read because of `error`. Throws DataError when there are too many.
  void note(int64_t index, const std::exception& error);
  /// Pictures noted so far.
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
  /// true, for training: the next picture replaces one that cannot be read. false: its row is left out.
  bool replace_broken = true;
  std::shared_ptr<BrokenImages> broken = {};  ///< shared by this rank's loaders of the images; null: its own
  int64_t global_batch = 0;
  int64_t micro_batch = 0;
  int64_t dp_rank = 0;
  int64_t dp_size = 1;
  int64_t first_step = 0;  ///< of the run, whose steps have had one EpochEnd from its beginning on
  int64_t prefetch = 4;    ///< micro-batches held ready
  int64_t threads = 1;
  bool pin_memory = false;
};

/// Steps of an epoch with EpochEnd::kShort: ceil(images / global_batch). With kRunOn epochs end within steps.
int64_t steps_per_epoch(int64_t images, int64_t global_batch);

/// Yields global_batch / dp_size / micro_batch micro-batches per step, for ever. A short step has only as
/// many micro-batches as its rows need (Batch::step_passes), the same number on all ranks; its rows are
/// divided among ranks and micro-batches as evenly as possible, so that a micro-batch may have none. An error
/// of a thread is thrown by the call of next() whose batch it concerns, and by all later ones.
class ImageLoader {
 public:
  /// Starts the threads. Throws LogicError for options that do not fit each other, and for a set without
  /// images.
  ImageLoader(std::shared_ptr<const ImageSet> images, const ImageLoaderOptions& options);
  /// Stops the threads and waits for them.
  ~ImageLoader();
  /// The next micro-batch of this rank: inputs (B, C, H, W) fp32, channels last in memory, and targets (B)
  /// int64, or (B, classes) fp32 with label smoothing or mixup; both on the CPU, pinned with pin_memory.
  /// Waits until the threads have made it. Throws DataError when too many pictures cannot be read. For one
  /// thread at a time.
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
/// Reads the images in this call; those that cannot be read are left out. `most` is at least 1.
PixelStatistics measure_pixels(const ImageSet& images, int64_t most);

}  // namespace trireme::data
