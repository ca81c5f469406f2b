#include <fmt/format.h>
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/data/images/codec.h"
#include "trireme/data/images/loader.h"
#include "trireme/data/images/set.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// A folder that goes with the scope.
class TemporaryImages {
 public:
  TemporaryImages() {
    std::string name = (fs::temp_directory_path() / "trireme-images-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      throw EnvironmentError("[cli.bench] no temporary folder {}: {}", name, errno_text(errno));
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

struct ImageCase {
  std::string name;
  std::vector<double> alone, whole;  ///< images a second of processor time, by round
  double mean_bytes = 0.0;
};

double median_of(std::vector<double> values) {
  std::ranges::sort(values);
  return 0.5 * (values[(values.size() - 1) / 2] + values[values.size() / 2]);
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
  TRIREME_CHECK(pixels > 0, "[cli.bench] an image has no pixels");
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

ImageCase measure(const std::string& name, const std::string& folder, const DataOptions& options) {
  const data::ImageSplits splits = data::open_images({.path = folder});
  ImageCase found{.name = name, .alone = {}, .whole = {}};
  std::vector<std::string> files;
  for (int64_t i = 0; i < std::min(options.images, splits.train->size()); ++i) {
    files.push_back(read_file(splits.train->name(i)));
    found.mean_bytes += static_cast<double>(files.back().size());
  }
  found.mean_bytes /= static_cast<double>(files.size());
  const int64_t least_side = usual(options.side).least_side();
  rate_alone(files, least_side);  // brings caches and clocks up
  for (int64_t round = 0; round < options.rounds; ++round) {
    found.alone.push_back(rate_alone(files, least_side));
    found.whole.push_back(rate_of_way(splits.train, options.images, options.side));
  }
  return found;
}

std::vector<ImageCase> measure_all(const DataOptions& options) {
  if (!options.path.empty()) return {measure(options.path, options.path, options)};
  std::vector<ImageCase> cases;
  for (const auto& [width, height] : {std::pair<int64_t, int64_t>{500, 375}, {256, 256}, {1024, 768}}) {
    const TemporaryImages folder;
    write_patchworks(folder.path(), options.images, height, width);
    cases.push_back(measure(fmt::format("{} x {}", width, height), folder.path(), options));
  }
  return cases;
}

}  // namespace

int worker_bench_images(const Request& request) {
  const DataOptions& options = request.data;
  const std::vector<ImageCase> cases = measure_all(options);
  if (!request.json) {
    using report::Align;
    report::Table table({{"JPEG files"},
                         {"bytes", Align::kRight},
                         {"decoder alone", Align::kRight},
                         {"whole pipeline", Align::kRight},
                         {"ratio", Align::kRight}});
    for (const ImageCase& each : cases)
      table.add_row({each.name, fmt::format("{:.0f}", each.mean_bytes),
                     fmt::format("{:.0f}/s", median_of(each.alone)),
                     fmt::format("{:.0f}/s", median_of(each.whole)),
                     fmt::format("{:.2f}", median_of(each.whole) / median_of(each.alone))});
    fmt::print("{}", table.to_string());
    return 0;
  }
  Json rows = Json::array();
  for (const ImageCase& each : cases) {
    rows.push_back({{"files", each.name},
                    {"mean_bytes", each.mean_bytes},
                    {"alone_per_s", each.alone},
                    {"whole_per_s", each.whole},
                    {"ratio", median_of(each.whole) / median_of(each.alone)}});
  }
  std::cout << Json{{"schema", "trireme.bench.images/1"},
                    {"command", request.command},
                    {"version", kVersion},
                    {"side", options.side},
                    {"images", options.images},
                    {"clock", "processor time of the process, one thread at work"},
                    {"alone", "decode_image(): libjpeg-turbo into a new buffer, scaled as in the whole way"},
                    {"whole",
                     "ImageLoader: read, decode, random resized crop, flip, normalise, into a batch"},
                    {"cases", rows}}
                   .dump(2)
            << "\n";
  return 0;
}

}  // namespace trireme::cli
