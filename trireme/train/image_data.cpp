// Images as a run reads them.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/data/images/builtin.h"
#include "trireme/data/images/codec.h"
#include "trireme/data/images/digits.h"
#include "trireme/data/images/loader.h"
#include "trireme/data/images/set.h"
#include "trireme/train/run_data.h"

namespace trireme::train {
namespace {

/// Images that mean and deviation are taken over; of files that are decoded one by one fewer.
constexpr int64_t kMostMeasured = 10000, kMostDecoded = 1000;
constexpr int64_t kMostThreads = 8;
constexpr int64_t kMostHashed = 64;  ///< images whose pixels count for the digest; labels count of all

int64_t threads_of(const TrainOptions& run) {
  if (run.config.data.threads > 0) return run.config.data.threads;
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  return std::clamp<int64_t>(cores / std::max<int64_t>(1, run.local_ranks), 1, kMostThreads);
}

data::PixelStatistics statistics_of(const data::ImageSet& images) {
  return data::measure_pixels(images, images.shape() ? kMostMeasured : kMostDecoded);
}

/// All labels, and the pixels of a few images at equal distances.
uint64_t digest_of(const data::ImageSet& images) {
  StreamingHash hash;
  for (int64_t index = 0; index < images.size(); ++index) {
    const int64_t label = images.label(index);
    hash.update(&label, sizeof(label));
  }
  const int64_t every = std::max<int64_t>(1, images.size() / kMostHashed);
  for (int64_t index = 0; index < images.size(); index += every) {
    try {
      const data::Image image = images.read(index);
      hash.update(image.pixels.data(), image.pixels.size());
    } catch (const data::BrokenImage&) {
      continue;  // the loader says which
    }
  }
  return hash.digest();
}

data::ImageTransform transform_of(const plan::Config& config, const data::PixelStatistics& pixels) {
  const plan::VisionConfig& model = config.model.vision;
  data::ImageTransform transform{
      .shape = {.channels = model.channels, .height = model.image_size, .width = model.image_size},
      .mean = pixels.mean,
      .deviation = pixels.deviation,
      .pad = config.data.pad,
      .flip = config.data.flip,
      .resized_crop = config.data.resized_crop,
      .least_area = config.data.least_area};
  // A channel that is the same everywhere tells nothing, whatever it is divided by.
  for (double& deviation : transform.deviation) deviation = std::max(deviation, 1e-3);
  return transform;
}

class ImageData : public RunData {
 public:
  ImageData(const TrainOptions& run, data::ImageSplits splits)
      : config_(run.config),
        splits_(std::move(splits)),
        threads_(threads_of(run)),
        transform_(transform_of(run.config, statistics_of(*splits_.train))),
        digest_(digest_of(*splits_.train)),
        held_out_digest_(splits_.val ? digest_of(*splits_.val) : 0),
        broken_(std::make_shared<data::BrokenImages>(splits_.train)),
        broken_val_(splits_.val ? std::make_shared<data::BrokenImages>(splits_.val) : nullptr) {}

  std::string description() const override;
  Sizes sizes() const override { return {samples(), val_samples()}; }
  std::string counted() const override { return "images"; }
  bool has_labels() const override { return true; }
  void check_fits(const plan::ModelConfig& model) const override;
  int64_t samples() const override { return splits_.train->size(); }
  uint64_t digest() const override { return digest_; }
  uint64_t held_out_digest() const override { return held_out_digest_; }
  int64_t samples_in(int64_t steps, const FeedOptions& options) const override;
  int64_t steps_for(int64_t epochs, const FeedOptions& options) const override {
    if (options.runs_on) return RunData::steps_for(epochs, options);
    return epochs * data::steps_per_epoch(samples(), options.global_batch);
  }
  Feed feed(const FeedOptions& options) const override;
  int64_t val_samples() const override { return splits_.val ? splits_.val->size() : 0; }
  ValidationFeed validation(int64_t most, const FeedOptions& options) const override;
  std::vector<std::string> classes() const override { return splits_.train->classes(); }
  std::string held_out_name(int64_t sample) const override { return splits_.val->name(sample); }
  Picture held_out_picture(int64_t sample) const override;
  std::string why_no_validation() const override { return splits_.why_no_val; }
  std::vector<std::string> notes() const override { return splits_.notes; }

 private:
  data::ImageLoaderOptions loader_options(const FeedOptions& options) const;

  plan::Config config_;
  data::ImageSplits splits_;
  int64_t threads_;
  data::ImageTransform transform_;
  uint64_t digest_, held_out_digest_;
  std::shared_ptr<data::BrokenImages> broken_, broken_val_;  ///< told once, however many loaders meet them
};

std::string ImageData::description() const {
  const bool drawn = std::filesystem::exists(std::filesystem::path(splits_.folder) / data::kDigitsRecord);
  const std::string format = drawn ? fmt::format("drawn digits ({} files)", splits_.format) : splits_.format;
  return fmt::format("{} in {}, {} + {} images of {} classes", format, splits_.folder, with_commas(samples()),
                     with_commas(val_samples()), splits_.train->classes().size());
}

void ImageData::check_fits(const plan::ModelConfig& config) const {
  const plan::VisionConfig& model = config.vision;
  const auto classes = static_cast<int64_t>(splits_.train->classes().size());
  if (classes != model.classes) {
    const std::string notes = splits_.notes.empty() ? "" : " (" + join(splits_.notes, "; ") + ")";
    throw ConfigError("[train.data] {} has {} classes{}, but model.classes={}; set model.classes={}",
                      splits_.folder, classes, notes, model.classes, classes);
  }
  const auto& shape = splits_.train->shape();
  if (!shape) return;
  if (shape->channels != model.channels) {
    throw ConfigError("[train.data] images in {} are {}, but model.channels={}; set model.channels={}",
                      splits_.folder, shape->to_string(), model.channels, shape->channels);
  }
  const bool same_size = shape->height == model.image_size && shape->width == model.image_size;
  if (same_size || config_.data.resized_crop) return;
  const std::string fix = shape->height == shape->width
                              ? fmt::format("set model.image_size={}, or ", shape->height)
                              : std::string();
  throw ConfigError(
      "[train.data] images in {} are {}, but model.image_size={}; {}data.resized_crop=true to train on "
      "resized "
      "parts of them",
      splits_.folder, shape->to_string(), model.image_size, fix);
}

int64_t ImageData::samples_in(int64_t steps, const FeedOptions& options) const {
  if (options.runs_on) return RunData::samples_in(steps, options);
  const int64_t epoch = data::steps_per_epoch(samples(), options.global_batch);
  return steps / epoch * samples() + steps % epoch * options.global_batch;
}

data::ImageLoaderOptions ImageData::loader_options(const FeedOptions& options) const {
  return {.seed = static_cast<uint64_t>(config_.seed),
          .transform = transform_,
          .mixup = config_.data.mixup,
          .broken = broken_,
          .global_batch = options.global_batch,
          .micro_batch = options.micro_batch,
          .dp_rank = options.dp_rank,
          .dp_size = options.dp_size,
          .first_step = options.first_step,
          .prefetch = std::max<int64_t>(4, 2 * threads_),
          .threads = threads_,
          .pin_memory = options.pin_memory};
}

Feed ImageData::feed(const FeedOptions& options) const {
  data::ImageLoaderOptions varied = loader_options(options);
  if (options.runs_on) varied.epoch_end = data::EpochEnd::kRunOn;
  const auto loader = std::make_shared<data::ImageLoader>(splits_.train, varied);
  return [loader] { return loader->next(); };
}

ValidationFeed ImageData::validation(int64_t most, const FeedOptions& options) const {
  data::ImageLoaderOptions fixed = loader_options(options);
  fixed.shuffle = false;
  fixed.transform = transform_.fixed();
  fixed.mixup = 0.0;
  fixed.replace_broken = false;
  fixed.broken = broken_val_;
  fixed.global_batch = options.micro_batch * options.dp_size;
  fixed.first_step = 0;
  const int64_t rounds = std::min(data::steps_per_epoch(val_samples(), fixed.global_batch),
                                  std::max<int64_t>(1, most / fixed.global_batch));
  const auto loader = std::make_shared<data::ImageLoader>(splits_.val, fixed);
  // Stages take several batches at once, perhaps more than there are.
  return {.next = [loader, left = rounds]() mutable { return left-- > 0 ? loader->next() : data::Batch(); },
          .batches = rounds};
}

Picture ImageData::held_out_picture(int64_t sample) const {
  data::ImageTransform bytes = transform_.fixed();
  bytes.mean.assign(bytes.mean.size(), 0.0);
  bytes.deviation.assign(bytes.deviation.size(), 1.0 / 255.0);
  const auto [channels, height, width] = bytes.shape;
  std::vector<float> values(static_cast<size_t>(channels * height * width));
  data::SampleDraws draws(0, 0, sample);  // nothing is drawn
  data::transform_image(splits_.val->read(sample, bytes.least_side()), bytes, draws,
                        {.values = values.data(), .channel = 1, .row = width * channels, .column = channels});
  Picture picture{.width = width, .height = height, .channels = channels, .pixels = {}};
  for (const float value : values)
    picture.pixels.push_back(static_cast<uint8_t>(std::clamp(std::round(value), 0.0F, 255.0F)));
  return picture;
}

data::ImageSplits open_splits(const TrainOptions& run, const data::OnProgress& on_progress) {
  const plan::Config& config = run.config;
  const bool builtin = config.data.path == "builtin";
  const int64_t channels = config.model.vision.channels;
  const std::string path =
      !builtin ? config.data.path
               : data::prepare_builtin_digits(
                     {.format = channels == 1 ? data::DigitFormat::kMnist : data::DigitFormat::kCifar10,
                      .cache_dir = run.cache_dir,
                      .train = channels == 1 ? 60000 : 50000,
                      .threads = std::max<int64_t>(1, std::thread::hardware_concurrency()),
                      .on_progress = on_progress});
  return data::open_images({.path = path, .val_fraction = config.data.val_fraction, .channels = channels});
}

}  // namespace

std::shared_ptr<const RunData> open_images(const TrainOptions& run, const data::OnProgress& on_progress) {
  return std::make_shared<ImageData>(run, open_splits(run, on_progress));
}

std::shared_ptr<const RunData> open_run_data(const TrainOptions& run, const data::OnProgress& on_progress) {
  if (run.config.data.path == plan::kProgramData) return open_program_data(run);
  if (!run.config.data.mixture.sources.empty()) return open_mixture(run, on_progress);
  return plan::reads_images(run.config.model.family) ? open_images(run, on_progress)
                                                     : open_text(run, on_progress);
}

}  // namespace trireme::train
