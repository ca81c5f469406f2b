#include "trireme/data/images/loader.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/data/image_files.h"
#include "tests/data/scratch.h"
#include "trireme/base/error.h"
#include "trireme/data/images/codec.h"

namespace trireme::data {
namespace {

using testing::message_of;

constexpr ImageShape kShape = {.channels = 3, .height = 6, .width = 5};
constexpr int64_t kClasses = 4;

/// Images whose pixels tell their index: (index, index, index), some of them broken.
class CountingImages : public ImageSet {
 public:
  explicit CountingImages(int64_t size, std::vector<int64_t> broken = {}) : broken_(std::move(broken)) {
    for (int64_t i = 0; i < kClasses; ++i) classes_.push_back(std::to_string(i));
    for (int64_t i = 0; i < size; ++i) labels_.push_back(static_cast<int32_t>(i * 7 % kClasses));
    shape_ = kShape;
  }
  Image read(int64_t index, int64_t) const override {
    if (std::ranges::find(broken_, index) != broken_.end()) throw BrokenImage("torn");
    return {.shape = kShape, .pixels = std::vector<uint8_t>(90, static_cast<uint8_t>(index))};
  }
  std::string name(int64_t index) const override { return "image " + std::to_string(index); }

 private:
  std::vector<int64_t> broken_;
};

/// Pixels come out as they are.
ImageTransform plain() {
  return {.shape = kShape, .mean = {0.0, 0.0, 0.0}, .deviation = {1.0 / 255.0, 1.0 / 255.0, 1.0 / 255.0}};
}

ImageLoaderOptions image_options_for(int64_t global_batch, int64_t micro_batch, int64_t dp_rank = 0,
                                     int64_t dp_size = 1) {
  ImageLoaderOptions options;
  options.seed = 5;
  options.transform = plain();
  options.global_batch = global_batch;
  options.micro_batch = micro_batch;
  options.dp_rank = dp_rank;
  options.dp_size = dp_size;
  return options;
}

std::vector<int64_t> indices_of(const Batch& batch) {
  std::vector<int64_t> indices;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const at::Tensor pixels = batch.inputs[row];
    EXPECT_EQ(pixels.min().item<float>(), pixels.max().item<float>());
    indices.push_back(std::llround(pixels[0][0][0].item<float>()));
    EXPECT_EQ(batch.targets[row].item<int64_t>(), indices.back() * 7 % kClasses);
  }
  EXPECT_EQ(batch.samples, indices);
  return indices;
}

/// The micro-batches of all ranks in `steps` steps, those of a step one after the other.
std::vector<Batch> collect(const std::shared_ptr<const ImageSet>& images, ImageLoaderOptions options,
                           int64_t ranks, int64_t steps) {
  std::vector<std::unique_ptr<ImageLoader>> loaders;
  options.dp_size = ranks;
  for (options.dp_rank = 0; options.dp_rank < ranks; ++options.dp_rank)
    loaders.push_back(std::make_unique<ImageLoader>(images, options));
  std::vector<Batch> batches;
  for (int64_t step = 0; step < steps; ++step) {
    for (const auto& loader : loaders) {
      int64_t passes = 0;
      do {
        batches.push_back(loader->next());
      } while (++passes < batches.back().step_passes);
    }
  }
  return batches;
}

/// Rows that count, joined.
std::pair<at::Tensor, at::Tensor> joined(const std::vector<Batch>& batches) {
  std::vector<at::Tensor> inputs, targets;
  for (const Batch& batch : batches) {
    inputs.push_back(batch.inputs.narrow(0, 0, batch.rows));
    targets.push_back(batch.targets.narrow(0, 0, batch.rows));
  }
  return {at::cat(inputs), at::cat(targets)};
}

TEST(ImageLoader, GivesChannelsLastFloatsAndLabels) {
  const auto images = std::make_shared<CountingImages>(20);
  ImageLoader loader(images, image_options_for(8, 4));
  const Batch batch = loader.next();
  EXPECT_EQ(batch.inputs.sizes(), (at::IntArrayRef{4, 3, 6, 5}));
  EXPECT_EQ(batch.inputs.scalar_type(), at::kFloat);
  EXPECT_TRUE(batch.inputs.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_EQ(batch.targets.sizes(), (at::IntArrayRef{4}));
  EXPECT_EQ(batch.targets.scalar_type(), at::kLong);
  EXPECT_EQ(batch.rows, 4);
  EXPECT_EQ(batch.step_rows, 8);
  indices_of(batch);
}

TEST(ImageLoader, CountsEverySampleOnceAnEpochWhateverTheRanks) {
  const auto images = std::make_shared<CountingImages>(29);
  for (const int64_t ranks : {1, 2, 3, 4}) {
    const ImageLoaderOptions options = image_options_for(12, 1);
    ASSERT_EQ(steps_per_epoch(29, 12), 3);
    std::vector<std::vector<int64_t>> epochs;
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      ImageLoaderOptions from = options;
      from.first_step = 3 * epoch;
      std::vector<int64_t> seen;
      int64_t rows = 0;
      for (const Batch& batch : collect(images, from, ranks, 3)) {
        rows += batch.rows;
        for (const int64_t index : indices_of(batch)) seen.push_back(index);
      }
      EXPECT_EQ(rows, 29);
      epochs.push_back(seen);
      std::ranges::sort(seen);
      std::vector<int64_t> all(29);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(seen, all) << ranks << " ranks, epoch " << epoch;
    }
    EXPECT_NE(epochs[0], epochs[1]);  // another order
  }
}

TEST(ImageLoader, DividesAShortStepAsEvenlyAsCanBe) {
  const auto images = std::make_shared<CountingImages>(17);
  ImageLoaderOptions options = image_options_for(12, 4);
  options.first_step = 1;  // of 5 rows
  std::vector<int64_t> rows;
  for (const Batch& batch : collect(images, options, 3, 1)) {
    EXPECT_EQ(batch.step_rows, 5);
    EXPECT_EQ(batch.inputs.size(0), batch.rows);
    rows.push_back(batch.rows);
  }
  EXPECT_EQ(rows, (std::vector<int64_t>{1, 2, 2}));
}

std::vector<int64_t> rows_of(const std::vector<Batch>& batches) {
  std::vector<int64_t> rows;
  for (const Batch& batch : batches) rows.push_back(batch.rows);
  return rows;
}

TEST(ImageLoader, SpreadsAShortStepEvenlyOverAsFewPassesAsHoldIt) {
  const auto images = std::make_shared<CountingImages>(37);
  // A step of 32 rows and one of 5, of one rank and of four, of which one has the second row more.
  const ImageLoaderOptions alone = image_options_for(32, 4), of_four = image_options_for(32, 1);
  EXPECT_EQ(rows_of(collect(images, alone, 1, 3)),
            (std::vector<int64_t>{4, 4, 4, 4, 4, 4, 4, 4, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4}));
  const std::vector<int64_t> rows = rows_of(collect(images, of_four, 4, 2));
  EXPECT_EQ(std::vector<int64_t>(rows.begin() + 32, rows.end()),
            (std::vector<int64_t>{0, 1, 0, 1, 0, 1, 1, 1}));
}

TEST(ImageLoader, GivesNoRowsWhereThereAreNone) {
  const auto images = std::make_shared<CountingImages>(13);
  ImageLoaderOptions options = image_options_for(12, 2);
  options.first_step = 1;  // of 1 row
  int64_t rows = 0;
  for (const Batch& batch : collect(images, options, 3, 1)) {
    rows += batch.rows;
    EXPECT_EQ(batch.inputs.sizes(), (at::IntArrayRef{batch.rows, 3, 6, 5}));
    EXPECT_EQ(batch.targets.sizes(), (at::IntArrayRef{batch.rows}));
    EXPECT_EQ(batch.step_passes, 1);
  }
  EXPECT_EQ(rows, 1);
}

TEST(ImageLoader, RunsOnIntoTheNextEpochWhenAsked) {
  const auto images = std::make_shared<CountingImages>(10);
  ImageLoaderOptions options = image_options_for(4, 4);
  options.epoch_end = EpochEnd::kRunOn;
  std::vector<int64_t> seen;
  for (const Batch& batch : collect(images, options, 1, 5)) {
    EXPECT_EQ(batch.rows, 4);
    for (const int64_t index : indices_of(batch)) seen.push_back(index);
  }
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    std::vector<int64_t> part(seen.begin() + 10 * epoch, seen.begin() + 10 * (epoch + 1));
    std::ranges::sort(part);
    for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(part[static_cast<size_t>(i)], i);
  }
}

/// With all that is random: the same numbers on any number of ranks and threads.
TEST(ImageLoader, GivesTheSameNumbersOnAnyRanksAndThreads) {
  const auto images = std::make_shared<CountingImages>(29);
  ImageLoaderOptions options = image_options_for(12, 1);
  options.transform.pad = 2;
  options.transform.flip = true;
  options.label_smoothing = 0.1;
  options.mixup = 0.4;
  const auto [inputs, targets] = joined(collect(images, options, 1, 6));
  EXPECT_EQ(inputs.size(0), 58);
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const int64_t threads : {1, 2, 3, 4}) {
      options.threads = threads;
      const auto [same_inputs, same_targets] = joined(collect(images, options, ranks, 6));
      EXPECT_TRUE(at::equal(inputs, same_inputs)) << ranks << " ranks, " << threads << " threads";
      EXPECT_TRUE(at::equal(targets, same_targets)) << ranks << " ranks, " << threads << " threads";
    }
  }
}

TEST(ImageLoader, GoesOnInTheMiddleOfAnEpoch) {
  const auto images = std::make_shared<CountingImages>(29);
  ImageLoaderOptions options = image_options_for(12, 3);
  options.transform.flip = true;
  options.mixup = 1.0;
  const std::vector<Batch> all = collect(images, options, 2, 8);
  options.first_step = 5;
  const std::vector<Batch> rest = collect(images, options, 2, 3);
  for (size_t i = 0; i < rest.size(); ++i) {
    const Batch& same = all[all.size() - rest.size() + i];
    EXPECT_TRUE(at::equal(rest[i].inputs, same.inputs)) << i;
    EXPECT_TRUE(at::equal(rest[i].targets, same.targets)) << i;
  }
}

TEST(ImageLoader, SmoothsLabels) {
  const auto images = std::make_shared<CountingImages>(8);
  ImageLoaderOptions options = image_options_for(8, 8);
  options.label_smoothing = 0.2;
  ImageLoader loader(images, options);
  const Batch batch = loader.next();
  ASSERT_EQ(batch.targets.sizes(), (at::IntArrayRef{8, kClasses}));
  for (int64_t row = 0; row < 8; ++row) {
    const int64_t label = std::llround(batch.inputs[row][0][0][0].item<float>()) * 7 % kClasses;
    for (int64_t i = 0; i < kClasses; ++i)
      EXPECT_NEAR(batch.targets[row][i].item<float>(), i == label ? 0.85 : 0.05, 1e-6);
  }
}

/// The row and its target are mixed by one share: pixels of constant pictures tell it.
TEST(ImageLoader, MixesTargetsAsItMixesPictures) {
  const auto images = std::make_shared<CountingImages>(16);
  ImageLoaderOptions options = image_options_for(16, 16);
  options.mixup = 1.0;
  options.shuffle = false;
  ImageLoader loader(images, options);
  const Batch batch = loader.next();
  int64_t between = 0;
  for (int64_t row = 0; row < 16; ++row) {
    const double pixel = batch.inputs[row][0][0][0].item<double>();
    bool explained = false;
    for (int64_t other = 0; other < 16 && !explained; ++other) {
      const double share =
          other == row ? 1.0 : (pixel - static_cast<double>(other)) / static_cast<double>(row - other);
      if (share < -1e-5 || share > 1.0 + 1e-5) continue;
      at::Tensor target = at::zeros({kClasses});
      target[row * 7 % kClasses] += share;
      target[other * 7 % kClasses] += 1.0 - share;
      explained = at::allclose(target, batch.targets[row], 0.0, 1e-4);
    }
    EXPECT_TRUE(explained) << row;
    between += std::abs(pixel - std::round(pixel)) > 1e-3 ? 1 : 0;
  }
  EXPECT_GT(between, 8);
}

TEST(ImageLoader, ReplacesWhatIsBrokenInTraining) {
  const auto images = std::make_shared<CountingImages>(20, std::vector<int64_t>{3, 4, 11});
  ImageLoaderOptions options = image_options_for(20, 20);
  ImageLoader loader(images, options);
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    std::vector<int64_t> seen = indices_of(loader.next());
    std::ranges::sort(seen);
    EXPECT_EQ(seen,
              (std::vector<int64_t>{0, 1, 2, 5, 5, 5, 6, 7, 8, 9, 10, 12, 12, 13, 14, 15, 16, 17, 18, 19}));
  }
  EXPECT_EQ(loader.broken(), 3);
}

TEST(ImageLoader, LeavesOutWhatIsBrokenInValidation) {
  const auto images = std::make_shared<CountingImages>(6, std::vector<int64_t>{1, 2, 3});
  ImageLoaderOptions options = image_options_for(6, 3);
  options.shuffle = options.replace_broken = false;
  ImageLoader loader(images, options);
  const Batch first = loader.next(), second = loader.next();
  EXPECT_EQ(indices_of(first), (std::vector<int64_t>{0}));
  EXPECT_EQ(indices_of(second), (std::vector<int64_t>{4, 5}));
  EXPECT_EQ(first.step_rows, 6);
}

TEST(ImageLoader, TellsOnceWhatSeveralLoadersMeet) {
  const auto images = std::make_shared<CountingImages>(6, std::vector<int64_t>{1, 3});
  ImageLoaderOptions options = image_options_for(6, 6);
  options.shuffle = options.replace_broken = false;
  options.broken = std::make_shared<BrokenImages>(images);
  ::testing::internal::CaptureStderr();
  for (int64_t epoch = 0; epoch < 3; ++epoch) EXPECT_EQ(ImageLoader(images, options).next().rows, 4);
  const std::string log = ::testing::internal::GetCapturedStderr();
  const size_t first = log.find("skipping image 3");
  ASSERT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find("skipping image 3", first + 1), std::string::npos) << log;
  EXPECT_EQ(options.broken->count(), 2);
}

TEST(ImageLoader, RefusesTooManyBrokenOnesAndNamesOne) {
  const auto images = std::make_shared<CountingImages>(20, std::vector<int64_t>{1, 2, 3});
  ImageLoaderOptions options = image_options_for(20, 20);
  options.broken = std::make_shared<BrokenImages>(images, 2);
  ImageLoader loader(images, options);
  const std::string message = message_of<DataError>([&] { loader.next(); });
  EXPECT_NE(message.find("3 of 20 images cannot be read, the last of them image "), std::string::npos)
      << message;
  EXPECT_NE(message.find("torn"), std::string::npos) << message;
  EXPECT_THROW(loader.next(), DataError);  // it stays so
}

TEST(ImageLoader, RefusesASetOfWhichNoneCanBeRead) {
  const auto images = std::make_shared<CountingImages>(3, std::vector<int64_t>{0, 1, 2});
  ImageLoader loader(images, image_options_for(2, 2));
  EXPECT_NE(message_of<DataError>([&] { loader.next(); }).find("none of 3 images can be read"),
            std::string::npos);
}

TEST(ImageLoader, EndsWhileItsThreadsWait) {
  const auto images = std::make_shared<CountingImages>(20);
  ImageLoaderOptions options = image_options_for(4, 1);
  options.threads = 3;
  options.prefetch = 1;
  for (int64_t i = 0; i < 20; ++i) {
    ImageLoader loader(images, options);
    if (i % 2 == 0) loader.next();
  }
}

TEST(PixelStatistics, AreThoseOfTheFormula) {
  const CountingImages images(5);  // pixels 0 to 4
  const PixelStatistics found = measure_pixels(images, 100);
  EXPECT_EQ(found.images, 5);
  EXPECT_EQ(measure_pixels(images, 3).images, 3);
  EXPECT_EQ(measure_pixels(CountingImages(199), 100).images, 100) << "no more than asked for";
  for (size_t channel = 0; channel < 3; ++channel) {
    EXPECT_NEAR(found.mean[channel], 2.0 / 255.0, 1e-12);
    EXPECT_NEAR(found.deviation[channel], std::sqrt(2.0) / 255.0, 1e-12);
  }
}

}  // namespace
}  // namespace trireme::data
