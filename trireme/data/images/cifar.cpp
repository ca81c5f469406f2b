// CIFAR's binary version (https://www.cs.toronto.edu/~kriz/cifar.html): records of labels and 3 x 32 x 32
// bytes, colour by colour.
#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/random_access_file.h"
#include "trireme/base/text.h"
#include "trireme/data/images/set.h"

namespace trireme::data {
namespace {

namespace fs = std::filesystem;

constexpr ImageShape kCifarShape = {.channels = 3, .height = 32, .width = 32};
constexpr int64_t kPlane = 32 * 32, kPixels = 3 * kPlane;

struct CifarFormat {
  const char* name;
  int64_t classes;
  int64_t label_bytes;      ///< before the pixels; the last one is the label
  const char* class_names;  ///< a file with one a line
};
constexpr CifarFormat kCifar10 = {"CIFAR-10", 10, 1, "batches.meta.txt"};
constexpr CifarFormat kCifar100 = {"CIFAR-100", 100, 2, "fine_label_names.txt"};

bool is_file(const std::string& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

/// Numbers where there is no file of names.
std::vector<std::string> class_names(const std::string& folder, const CifarFormat& format) {
  std::vector<std::string> names;
  const std::string path = folder + "/" + format.class_names;
  if (is_file(path)) names = split(read_file(path), '\n');
  std::erase_if(names, [](const std::string& name) { return name.empty() || name == "\r"; });
  for (std::string& name : names) {
    if (name.ends_with('\r')) name.pop_back();
  }
  if (names.empty()) {
    for (int64_t label = 0; label < format.classes; ++label) names.push_back(std::to_string(label));
  }
  if (static_cast<int64_t>(names.size()) != format.classes) {
    throw DataError("[data.cifar] {} names {} classes, but {} has {}", path, names.size(), format.name,
                    format.classes);
  }
  return names;
}

class CifarSet : public ImageSet {
 public:
  CifarSet(const CifarFormat& format, const std::vector<std::string>& paths, std::vector<std::string> names)
      : format_(format), record_(format.label_bytes + kPixels) {
    classes_ = std::move(names);
    shape_ = kCifarShape;
    for (const std::string& path : paths) add(path);
  }

  Image read(int64_t index, int64_t) const override {
    const auto [file, record] = find(index);
    std::array<std::byte, kPixels> planes;
    files_[file].read(record * record_ + format_.label_bytes, planes);
    Image image{.shape = kCifarShape, .pixels = std::vector<uint8_t>(static_cast<size_t>(kPixels))};
    for (int64_t pixel = 0; pixel < kPlane; ++pixel) {
      for (int64_t channel = 0; channel < 3; ++channel)
        image.pixels[static_cast<size_t>(3 * pixel + channel)] =
            static_cast<uint8_t>(planes[static_cast<size_t>(channel * kPlane + pixel)]);
    }
    return image;
  }

  std::string name(int64_t index) const override {
    const auto [file, record] = find(index);
    return fmt::format("image {} of {}", record, files_[file].path());
  }

 private:
  void add(const std::string& path) {
    RandomAccessFile file(path);
    const int64_t bytes = file.size();
    if (bytes == 0 || bytes % record_ != 0) {
      throw DataError(
          "[data.cifar] {} has {} bytes, which is not a multiple of the {} of one image; download it again",
          path, bytes, record_);
    }
    begins_.push_back(size());
    std::vector<std::byte> content(static_cast<size_t>(record_));
    for (int64_t record = 0; record < bytes / record_; ++record) {
      file.read(record * record_, content);
      const auto label = static_cast<int32_t>(content[static_cast<size_t>(format_.label_bytes - 1)]);
      if (label >= format_.classes) {
        throw DataError(
            "[data.cifar] image {} of {} has label {}, but labels of {} end at {}; download it again", record,
            path, label, format_.name, format_.classes - 1);
      }
      labels_.push_back(label);
    }
    files_.push_back(std::move(file));
  }

  std::pair<size_t, int64_t> find(int64_t index) const {
    const auto after = std::ranges::upper_bound(begins_, index);
    const auto file = static_cast<size_t>(after - begins_.begin()) - 1;
    return {file, index - begins_[file]};
  }

  const CifarFormat format_;
  const int64_t record_;  ///< bytes
  std::vector<RandomAccessFile> files_;
  std::vector<int64_t> begins_;  ///< the first image of each file
};

/// data_batch_1.bin and on.
std::vector<std::string> batch_files(const std::string& folder) {
  const auto path_of = [&](int64_t number) { return fmt::format("{}/data_batch_{}.bin", folder, number); };
  std::vector<std::string> paths;
  while (is_file(path_of(static_cast<int64_t>(paths.size()) + 1)))
    paths.push_back(path_of(static_cast<int64_t>(paths.size()) + 1));
  constexpr int64_t kBatches = 5;  // of the set that everybody has
  for (int64_t number = static_cast<int64_t>(paths.size()) + 2; number <= kBatches; ++number) {
    if (is_file(path_of(number))) {
      throw DataError("[data.cifar] {} exists but {} does not; download the data again", path_of(number),
                      path_of(static_cast<int64_t>(paths.size()) + 1));
    }
  }
  return paths;
}

ImageSplits make_splits(const CifarFormat& format, const std::string& folder,
                        const std::vector<std::string>& train, const std::string& test) {
  const std::vector<std::string> names = class_names(folder, format);
  ImageSplits splits{.train = std::make_shared<CifarSet>(format, train, names),
                     .val = nullptr,
                     .format = format.name,
                     .folder = folder};
  if (is_file(test)) {
    splits.val = std::make_shared<CifarSet>(format, std::vector{test}, names);
  } else {
    splits.why_no_val = test + " is not there; download it";
  }
  return splits;
}

}  // namespace

std::optional<ImageSplits> open_cifar(const std::string& folder) {
  if (const auto batches = batch_files(folder); !batches.empty())
    return make_splits(kCifar10, folder, batches, folder + "/test_batch.bin");
  if (is_file(folder + "/train.bin"))
    return make_splits(kCifar100, folder, {folder + "/train.bin"}, folder + "/test.bin");
  return std::nullopt;
}

}  // namespace trireme::data
