#include "trireme/data/images/loader.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/threads.h"
#include "trireme/data/images/codec.h"
#include "trireme/data/sampler.h"

namespace trireme::data {
namespace {

/// Draws of what belongs to a pair of pictures, apart from those of each.
constexpr uint64_t kMixing = 0x6d69787570ULL;
constexpr int64_t kNamedBroken = 8;

void check_image_options(const ImageSet& images, const ImageLoaderOptions& options) {
  TRIREME_CHECK(images.size() >= 1, "[data.loader] the set has no images");
  TRIREME_CHECK(options.dp_rank >= 0 && options.dp_rank < options.dp_size,
                "[data.loader] dp_rank={} is outside dp_size={}", options.dp_rank, options.dp_size);
  TRIREME_CHECK(options.micro_batch >= 1 && options.global_batch >= 1 &&
                    options.global_batch % (options.dp_size * options.micro_batch) == 0,
                "[data.loader] global_batch={} is not a multiple of dp_size={} x micro_batch={}",
                options.global_batch, options.dp_size, options.micro_batch);
  TRIREME_CHECK(options.first_step >= 0 && options.prefetch >= 1 && options.threads >= 1,
                "[data.loader] first_step={} must be at least 0, prefetch={} and threads={} at least 1",
                options.first_step, options.prefetch, options.threads);
  TRIREME_CHECK(options.label_smoothing >= 0.0 && options.label_smoothing < 1.0 && options.mixup >= 0.0 &&
                    options.mixup <= 1.0,
                "[data.loader] label_smoothing={} must be in [0, 1) and mixup={} in [0, 1]",
                options.label_smoothing, options.mixup);
}

/// A row of a step: a place in the order of an epoch.
struct Place {
  int64_t epoch = 0, position = 0;
};

/// Which rows a micro-batch of this rank has.
struct Share {
  std::vector<Place> places;
  int64_t step_rows = 0, step_passes = 0;
};

/// Micro-batches of a rank in a whole step.
int64_t most_passes(const ImageLoaderOptions& options) {
  return options.global_batch / options.dp_size / options.micro_batch;
}

/// The pass number `pass` of a step of this rank. A short step has as few passes as hold the rows of the rank
/// with the most, so that all ranks have as many, each with as many rows as the others, or one less.
Share share_of(int64_t step, int64_t pass, int64_t images, const ImageLoaderOptions& options) {
  int64_t epoch = 0, begin = step * options.global_batch, rows = options.global_batch;
  if (options.epoch_end == EpochEnd::kShort) {
    const int64_t steps = steps_per_epoch(images, options.global_batch);
    epoch = step / steps;
    begin = step % steps * options.global_batch;
    rows = std::min(rows, images - begin);
  }
  const int64_t mine = begin + rows * options.dp_rank / options.dp_size;
  const int64_t end = begin + rows * (options.dp_rank + 1) / options.dp_size;
  const int64_t most_of_rank = (rows + options.dp_size - 1) / options.dp_size;
  const int64_t passes = (most_of_rank + options.micro_batch - 1) / options.micro_batch;
  Share share{.places = {}, .step_rows = rows, .step_passes = passes};
  for (int64_t at = mine + (end - mine) * pass / passes; at < mine + (end - mine) * (pass + 1) / passes; ++at)
    share.places.push_back({.epoch = epoch + at / images, .position = at % images});
  return share;
}

/// Makes micro-batches; no state but what is broken.
class ImageReader {
 public:
  ImageReader(const std::shared_ptr<const ImageSet>& images, const ImageLoaderOptions& options)
      : images_(*images),
        options_(options),
        broken_(options.broken ? options.broken : std::make_shared<BrokenImages>(images)),
        least_side_(options.transform.least_side()),
        soft_(options.mixup > 0.0 || options.label_smoothing > 0.0) {}

  Batch read(const Share& share) {
    const auto room = static_cast<int64_t>(share.places.size());
    Batch batch = empty_batch(room);
    batch.step_rows = share.step_rows;
    batch.step_passes = share.step_passes;
    for (const Place& place : share.places) batch.rows += read_row(place, batch, batch.rows) ? 1 : 0;
    batch.inputs = batch.inputs.narrow(0, 0, batch.rows);
    batch.targets = batch.targets.narrow(0, 0, batch.rows);
    return batch;
  }

  int64_t broken() const { return broken_->count(); }

 private:
  Batch empty_batch(int64_t rows) const {
    const auto [channels, height, width] = options_.transform.shape;
    const auto classes = static_cast<int64_t>(images_.classes().size());
    const auto pinned = [this](at::ScalarType type) {
      return at::TensorOptions().dtype(type).pinned_memory(options_.pin_memory);
    };
    Batch batch;
    batch.inputs = at::empty({rows, height, width, channels}, pinned(at::kFloat)).permute({0, 3, 1, 2});
    batch.targets =
        soft_ ? at::zeros({rows, classes}, pinned(at::kFloat)) : at::zeros({rows}, pinned(at::kLong));
    return batch;
  }

  /// The part of a picture that a row shows, and the picture's index in the set, which may be that of a
  /// replacement.
  struct Found {
    int64_t index = 0;
    ImageView view;
    Image part;
  };

  /// None: it is broken and not replaced.
  std::optional<Found> find(int64_t index, int64_t epoch) {
    for (int64_t tried = 0; tried < images_.size(); ++tried, index = (index + 1) % images_.size()) {
      try {
        Found found{.index = index, .view = {}, .part = {}};
        found.part = images_.read_part(index, least_side_, [&](const ImageShape& shape) {
          SampleDraws draws(options_.seed, epoch, index);
          found.view = draw_view(options_.transform, shape, draws);
          return found.view.part;
        });
        return found;
      } catch (const BrokenImage& error) {
        broken_->note(index, error);
        if (!options_.replace_broken) return std::nullopt;
      }
    }
    throw DataError("[data.loader] none of {} images can be read", images_.size());
  }

  int64_t index_at(const Place& place) const {
    return options_.shuffle ? permuted(place.position, images_.size(), options_.seed, place.epoch)
                            : place.position;
  }

  bool read_row(const Place& place, Batch& batch, int64_t row) {
    const std::optional<Found> found = find(index_at(place), place.epoch);
    if (!found) return false;
    const at::Tensor& inputs = batch.inputs;
    const PixelRoom room{.values = inputs.mutable_data_ptr<float>() + row * inputs.stride(0),
                         .channel = inputs.stride(1),
                         .row = inputs.stride(2),
                         .column = inputs.stride(3)};
    write_view(found->part, found->view, options_.transform, room);
    batch.samples.push_back(found->index);
    const int64_t label = images_.label(found->index);
    if (!soft_) {
      batch.targets.mutable_data_ptr<int64_t>()[row] = label;
      return true;
    }
    float* target = batch.targets.mutable_data_ptr<float>() + row * batch.targets.size(1);
    const auto share = options_.mixup > 0.0 ? mix(*found, place, room, target) : 1.0;
    add_label(label, share, target);
    return true;
  }

  void add_label(int64_t label, double share, float* target) const {
    const auto classes = static_cast<double>(images_.classes().size());
    for (size_t i = 0; i < images_.classes().size(); ++i)
      target[i] += static_cast<float>(share * options_.label_smoothing / classes);
    target[label] += static_cast<float>(share * (1.0 - options_.label_smoothing));
  }

  /// Mixes another picture into the row; returns the share that is left for the first.
  double mix(const Found& first, const Place& place, const PixelRoom& room, float* target) {
    SampleDraws draws(options_.seed ^ kMixing, place.epoch, first.index);
    const double share = mixing_share(options_.mixup, draws);
    const std::optional<Found> second = find(draws.below(images_.size()), place.epoch);
    if (!second) return 1.0;
    const auto [channels, height, width] = options_.transform.shape;
    std::vector<float> other(static_cast<size_t>(channels * height * width));
    write_view(second->part, second->view, options_.transform,
               {.values = other.data(), .channel = 1, .row = width * channels, .column = channels});
    // Rows of a batch have their channels last, too.
    for (size_t i = 0; i < other.size(); ++i) {
      room.values[i] = static_cast<float>(share * static_cast<double>(room.values[i]) +
                                          (1.0 - share) * static_cast<double>(other[i]));
    }
    add_label(images_.label(second->index), 1.0 - share, target);
    return share;
  }

  const ImageSet& images_;
  const ImageLoaderOptions& options_;
  std::shared_ptr<BrokenImages> broken_;
  const int64_t least_side_;
  const bool soft_;
};

}  // namespace

BrokenImages::BrokenImages(std::shared_ptr<const ImageSet> images, int64_t most)
    : images_(std::move(images)), most_(most > 0 ? most : std::max<int64_t>(8, images_->size() / 100)) {}

void BrokenImages::note(int64_t index, const std::exception& error) {
  const std::lock_guard lock(mutex_);
  if (!indices_.insert(index).second) return;
  const auto count = std::ssize(indices_);
  if (count > most_) {
    throw DataError(
        "[data.loader] {} of {} images cannot be read, the last of them {}: {}; repair or remove them", count,
        images_->size(), images_->name(index), error.what());
  }
  if (count <= kNamedBroken) {
    log_warning("skipping {}: {}{}", images_->name(index), error.what(),
                count == kNamedBroken ? "; further skipped images are only counted" : "");
  }
}

int64_t BrokenImages::count() const {
  const std::lock_guard lock(mutex_);
  return std::ssize(indices_);
}

int64_t steps_per_epoch(int64_t images, int64_t global_batch) {
  return (images + global_batch - 1) / global_batch;
}

class ImageLoader::Impl {
 public:
  Impl(std::shared_ptr<const ImageSet> images, const ImageLoaderOptions& options)
      : images_(std::move(images)), options_(options), reader_(images_, options_) {
    taken_ = begun_ = options_.first_step * most_passes(options_);
    start_threads(options_.threads, 1,
                  [this] { threads_.emplace_back([this](const std::stop_token& stop) { run(stop); }); });
  }

  Batch next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ready_.contains(taken_); });
    Made& made = ready_.at(taken_);
    if (made.error) std::rethrow_exception(made.error);
    Batch batch = std::move(made.batch);
    ready_.erase(taken_);
    taken_ = after(taken_, batch.step_passes);
    changed_.notify_all();
    return batch;
  }

  int64_t broken() const { return reader_.broken(); }

 private:
  struct Made {
    Batch batch;
    std::exception_ptr error;
  };

  Share share(int64_t number) const {
    const int64_t most = most_passes(options_);
    return share_of(number / most, number % most, images_->size(), options_);
  }

  /// The number that follows one of a step of so many passes.
  int64_t after(int64_t number, int64_t step_passes) const {
    const int64_t most = most_passes(options_);
    return number % most + 1 < step_passes ? number + 1 : (number / most + 1) * most;
  }

  void run(const std::stop_token& stop) {
    while (const std::optional<int64_t> number = begin_next(stop)) {
      Made made;
      try {
        made.batch = reader_.read(share(*number));
      } catch (...) {
        made.error = std::current_exception();
      }
      const std::lock_guard lock(mutex_);
      ready_[*number] = std::move(made);
      changed_.notify_all();
    }
  }

  /// The number of the next micro-batch to make; none: loading ends.
  std::optional<int64_t> begin_next(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    const bool goes_on = changed_.wait(lock, stop, [this] { return begun_ - taken_ < options_.prefetch; });
    if (!goes_on || stop.stop_requested()) return std::nullopt;
    return std::exchange(begun_, after(begun_, share(begun_).step_passes));
  }

  const std::shared_ptr<const ImageSet> images_;
  const ImageLoaderOptions options_;
  ImageReader reader_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::map<int64_t, Made> ready_;  ///< by number
  /// Micro-batches of this rank since the run began, counted as if every step had all of them.
  int64_t taken_ = 0, begun_ = 0;
  std::vector<std::jthread> threads_;  // last: stop and join before what they use goes
};

ImageLoader::ImageLoader(std::shared_ptr<const ImageSet> images, const ImageLoaderOptions& options) {
  check_image_options(*images, options);
  impl_ = std::make_unique<Impl>(std::move(images), options);
}

ImageLoader::~ImageLoader() = default;

Batch ImageLoader::next() {
  return impl_->next();
}

int64_t ImageLoader::broken() const {
  return impl_->broken();
}

PixelStatistics measure_pixels(const ImageSet& images, int64_t most) {
  const int64_t every = (images.size() + most - 1) / most;
  std::vector<double> sums, squares;
  double pixels = 0.0;
  PixelStatistics found;
  for (int64_t index = 0; index < images.size(); index += every) {
    Image image;
    try {
      image = images.read(index);
    } catch (const BrokenImage&) {
      continue;
    }
    const auto channels = static_cast<size_t>(image.shape.channels);
    sums.resize(channels);
    squares.resize(channels);
    for (size_t at = 0; at < image.pixels.size(); ++at) {
      const double value = image.pixels[at] / 255.0;
      sums[at % channels] += value;
      squares[at % channels] += value * value;
    }
    pixels += static_cast<double>(image.pixels.size() / channels);
    ++found.images;
  }
  for (size_t channel = 0; channel < sums.size(); ++channel) {
    const double mean = sums[channel] / pixels;
    found.mean.push_back(mean);
    found.deviation.push_back(std::sqrt(std::max(0.0, squares[channel] / pixels - mean * mean)));
  }
  return found;
}

}  // namespace trireme::data
