#include "trireme/bench/image_loading.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/data/images/codec.h"
#include "trireme/data/images/loader.h"
#include "trireme/data/images/set.h"

namespace trireme::bench {
namespace {

namespace fs = std::filesystem;

/// A folder that goes with the scope.
class TemporaryImages {
 public:
  TemporaryImages() {
    std::string name = (fs::temp_directory_path() / "trireme-images-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      throw EnvironmentError("[bench.images] no temporary folder {}: {}", name, errno_text(errno));
    path_ = name;
  }
  ~TemporaryImages() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryImages(const TemporaryImages&) = delete;
  TemporaryImages& operator=(const TemporaryImages&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Patches of several sizes over each other: about as many bytes a pixel as a photograph has.
data::Image patchwork(int64_t index, int64_t height, int64_t width) {
  data::Image image{.shape = {3, height, width}, .pixels = {}};
  image.pixels.reserve(static_cast<size_t>(3 * height * width));
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      for (int64_t channel = 0; channel < 3; ++channel) {
        double value = 40.0;
        for (const int64_t size : {61, 23, 7, 2}) {
          const auto key = static_cast<uint64_t>(index * 31 + channel * (size > 7 ? 1 : 0) + size * 1000);
          const auto place = static_cast<uint64_t>((y / size) * 4096 + x / size);
          value += static_cast<double>(mix64(key, place) % 1000) * 1e-3 * 1.2 * static_cast<double>(size);
        }
        image.pixels.push_back(static_cast<uint8_t>(std::min(255.0, value)));
      }
    }
  }
  return image;
}

void write_patchworks(const std::string& folder, int64_t images, int64_t height, int64_t width) {
  make_directories(folder + "/patchwork");
  for (int64_t i = 0; i < images; ++i)
    write_file_atomic(fmt::format("{}/patchwork/{:05}.jpg", folder, i),
                      data::encode_jpeg(patchwork(i, height, width), 85));
}

double processor_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

data::ImageTransform usual(int64_t side) {
  return {.shape = {3, side, side},
          .mean = {0.485, 0.456, 0.406},
          .deviation = {0.229, 0.224, 0.225},
          .flip = true,
          .resized_crop = true};
}

/// Files in memory, so that both sides begin at the same place.
double rate_alone(const std::vector<std::string>& files, int64_t least_side) {
  const double began = processor_seconds();
  int64_t pixels = 0;
  for (const std::string& file : files) {
    const data::Image image =
        data::decode_image(std::as_bytes(std::span(file)), {.channels = 3, .least_side = least_side});
    pixels += image.shape.width;
  }
  TRIREME_CHECK(pixels > 0, "[bench.images] an image has no pixels");
  return static_cast<double>(files.size()) / (processor_seconds() - began);
}

double rate_of_way(const std::shared_ptr<const data::ImageSet>& images, int64_t count, int64_t side) {
  constexpr int64_t kBatch = 8;
  data::ImageLoaderOptions options;
  options.epoch_end = data::EpochEnd::kRunOn;
  options.transform = usual(side);
  options.global_batch = options.micro_batch = kBatch;
  options.prefetch = 1;  // nothing is under way when the clock is read
  data::ImageLoader loader(images, options);
  loader.next();
  const double began = processor_seconds();
  const int64_t batches = std::max<int64_t>(1, count / kBatch);
  for (int64_t i = 0; i < batches; ++i) loader.next();
  return static_cast<double>(batches * kBatch) / (processor_seconds() - began);
}

ImageRates measure(const std::string& name, const std::string& folder, const ImageRun& run) {
  const data::ImageSplits splits = data::open_images({.path = folder});
  ImageRates found{.name = name, .alone = {}, .whole = {}};
  std::vector<std::string> files;
  for (int64_t i = 0; i < std::min(run.images, splits.train->size()); ++i) {
    files.push_back(read_file(splits.train->name(i)));
    found.mean_bytes += static_cast<double>(files.back().size());
  }
  found.mean_bytes /= static_cast<double>(files.size());
  const int64_t least_side = usual(run.side).least_side();
  rate_alone(files, least_side);  // brings caches and clocks up
  for (int64_t round = 0; round < run.rounds; ++round) {
    found.alone.push_back(rate_alone(files, least_side));
    found.whole.push_back(rate_of_way(splits.train, run.images, run.side));
  }
  return found;
}

}  // namespace

std::vector<ImageRates> measure_image_loading(const ImageRun& run) {
  if (!run.path.empty()) return {measure(run.path, run.path, run)};
  std::vector<ImageRates> cases;
  for (const auto& [width, height] : {std::pair<int64_t, int64_t>{500, 375}, {256, 256}, {1024, 768}}) {
    const TemporaryImages folder;
    write_patchworks(folder.path(), run.images, height, width);
    cases.push_back(measure(fmt::format("{} x {}", width, height), folder.path(), run));
  }
  return cases;
}

}  // namespace trireme::bench
