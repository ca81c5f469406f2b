#include "trireme/data/images/digits.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <exception>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/data/sampler.h"

namespace trireme::data {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kWhat =
    "Digits that 'trireme data make digits' drew from fonts. They have the form of the files of CIFAR-10 or "
    "MNIST "
    "and nothing else of them. Other fonts, or another FreeType, give other bytes.";
constexpr std::array<const char*, 10> kNames = {"zero", "one", "two",   "three", "four",
                                                "five", "six", "seven", "eight", "nine"};
constexpr int64_t kTrainBatches = 5;

/// Images [first, first + count) of a split.
struct Range {
  int64_t split = 0;  ///< 0: train, 1: test
  int64_t first = 0, count = 0;
};

/// Draws ranges of images on several threads, each image into its own place.
class Press {
 public:
  Press(const DigitOptions& options, std::vector<std::string> files)
      : options_(options), files_(std::move(files)) {}

  /// Calls `take(place in the range, label, image)` from several threads.
  template <typename Take>
  void print(const Range& range, const Take& take) {
    std::atomic<int64_t> next = 0;
    std::exception_ptr error;
    const auto work = [&] {
      try {
        DigitPainter painter(files_);
        constexpr int64_t kAtOnce = 256;
        for (int64_t begin = next.fetch_add(kAtOnce); begin < range.count; begin = next.fetch_add(kAtOnce)) {
          const int64_t end = std::min(begin + kAtOnce, range.count);
          for (int64_t place = begin; place < end; ++place) draw(painter, range, place, take);
          tell(end - begin);
        }
      } catch (...) {
        const std::lock_guard lock(mutex_);
        error = std::current_exception();
        next = range.count;
      }
    };
    {
      std::vector<std::jthread> threads;
      for (int64_t thread = 1; thread < options_.threads; ++thread) threads.emplace_back(work);
      work();
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  template <typename Take>
  void draw(DigitPainter& painter, const Range& range, int64_t place, const Take& take) const {
    const int64_t index = range.first + place;
    const int64_t images = range.split == 0 ? options_.train : options_.test;
    const int64_t digit = permuted(index, images, options_.seed, range.split) % 10;
    SampleDraws draws(options_.seed, range.split, index);
    take(place, digit, painter.draw(digit, options_.format, draws));
  }

  void tell(int64_t images) {
    const std::lock_guard lock(mutex_);
    done_ += images;
    if (options_.on_progress) options_.on_progress(done_, options_.train + options_.test);
  }

  const DigitOptions& options_;
  std::vector<std::string> files_;
  std::mutex mutex_;
  int64_t done_ = 0;
};

struct DigitFile {
  std::string name, bytes;
};

/// A file of CIFAR-10: label, then colour by colour.
std::string cifar_records(Press& press, const Range& range) {
  constexpr size_t kPlane = 32 * 32, kDigitsRecordBytes = 1 + 3 * kPlane;
  std::string bytes(static_cast<size_t>(range.count) * kDigitsRecordBytes, '\0');
  press.print(range, [&](int64_t place, int64_t digit, const Image& image) {
    char* record = bytes.data() + static_cast<size_t>(place) * kDigitsRecordBytes;
    record[0] = static_cast<char>(digit);
    for (size_t pixel = 0; pixel < kPlane; ++pixel) {
      for (size_t channel = 0; channel < 3; ++channel)
        record[1 + channel * kPlane + pixel] = static_cast<char>(image.pixels[3 * pixel + channel]);
    }
  });
  return bytes;
}

std::string idx_header(std::initializer_list<int64_t> dims) {
  std::string header = {0, 0, 8, static_cast<char>(dims.size())};
  for (const int64_t dim : dims) {
    for (const int shift : {24, 16, 8, 0}) header.push_back(static_cast<char>(dim >> shift & 0xff));
  }
  return header;
}

/// The two files of a split of MNIST.
std::pair<std::string, std::string> idx_records(Press& press, const Range& range) {
  constexpr size_t kPixels = 28 * 28;
  std::string images = idx_header({range.count, 28, 28}), labels = idx_header({range.count});
  const size_t images_begin = images.size(), labels_begin = labels.size();
  images.resize(images_begin + static_cast<size_t>(range.count) * kPixels);
  labels.resize(labels_begin + static_cast<size_t>(range.count));
  press.print(range, [&](int64_t place, int64_t digit, const Image& image) {
    std::ranges::copy(image.pixels,
                      images.begin() + static_cast<int64_t>(images_begin) + place * int64_t{kPixels});
    labels[labels_begin + static_cast<size_t>(place)] = static_cast<char>(digit);
  });
  return {std::move(images), std::move(labels)};
}

/// Writes files and keeps the digest of them all.
class DigitFolder {
 public:
  explicit DigitFolder(std::string path) : path_(std::move(path)) { make_directories(path_); }

  void write(const std::string& name, const std::string& bytes) {
    write_file_atomic(path_ + "/" + name, bytes);
    hash_.update(bytes.data(), bytes.size());
  }
  std::string digest() const { return hex64(hash_.digest()); }

 private:
  std::string path_;
  StreamingHash hash_;
};

void write_cifar(const DigitOptions& options, Press& press, DigitFolder& folder) {
  std::string names;
  for (const char* name : kNames) names += std::string(name) + "\n";
  folder.write("batches.meta.txt", names);
  for (int64_t batch = 0; batch < kTrainBatches; ++batch) {
    const int64_t begin = options.train * batch / kTrainBatches;
    const int64_t end = options.train * (batch + 1) / kTrainBatches;
    folder.write(fmt::format("data_batch_{}.bin", batch + 1),
                 cifar_records(press, {.split = 0, .first = begin, .count = end - begin}));
  }
  folder.write("test_batch.bin", cifar_records(press, {.split = 1, .first = 0, .count = options.test}));
}

void write_mnist(const DigitOptions& options, Press& press, DigitFolder& folder) {
  const auto write = [&](const std::string& split, const Range& range) {
    const auto [images, labels] = idx_records(press, range);
    folder.write(split + "-images-idx3-ubyte", images);
    folder.write(split + "-labels-idx1-ubyte", labels);
  };
  write("train", {.split = 0, .first = 0, .count = options.train});
  write("t10k", {.split = 1, .first = 0, .count = options.test});
}

void check_digit_options(const DigitOptions& options) {
  constexpr int64_t kMost = 10'000'000;
  for (const auto& [name, count] : {std::pair{"--train", options.train}, std::pair{"--test", options.test}}) {
    if (count >= 10 && count <= kMost) continue;
    throw ConfigError("[data.digits] {} is {}, but must be from 10 to {}; each digit is drawn equally often",
                      name, count, kMost);
  }
}

/// Everything that the files depend on.
Json recipe(const DigitOptions& options, const DigitPainter& painter) {
  Json fonts = Json::array();
  for (size_t i = 0; i < painter.fonts().size(); ++i)
    fonts.push_back({{"name", painter.fonts()[i]}, {"xxh3", hex64(xxh3(read_file(painter.files()[i])))}});
  return {{"what", kWhat},          {"format", options.format == DigitFormat::kMnist ? "mnist" : "cifar10"},
          {"train", options.train}, {"test", options.test},
          {"seed", options.seed},   {"fonts", fonts}};
}

/// The digest of what the folder holds, when it was made by this recipe; empty: there is nothing, or what was
/// begun by it and given up. Throws when it holds something else.
std::string digest_there(const std::string& folder, const Json& wanted) {
  std::error_code error;
  if (!fs::exists(folder, error)) return {};
  if (!fs::is_directory(folder, error))
    throw ConfigError("[data.digits] {} is not a folder; choose another --out", folder);
  if (fs::is_empty(folder, error)) return {};
  const std::string path = folder + "/" + kDigitsRecord;
  if (!fs::exists(path, error)) {
    throw ConfigError(
        "[data.digits] {} has other files, which would be mixed with these; choose another --out", folder);
  }
  Json record = Json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  if (!record.is_object()) throw DataError("[data.digits] {} is damaged; remove the folder", path);
  const Json kept = record.value("digest", Json());
  const std::string digest = kept.is_string() ? kept.get<std::string>() : std::string();
  record.erase("digest");
  if (record == wanted) return digest;
  throw ConfigError(
      "[data.digits] {} has digits made with other counts, another seed or other fonts ({}); choose another "
      "--out, or remove the folder",
      folder, path);
}

bool is_font(const fs::path& path) {
  std::string ending = path.extension().string();
  std::ranges::transform(ending, ending.begin(), [](unsigned char c) { return std::tolower(c); });
  return ending == ".ttf" || ending == ".otf";
}

}  // namespace

std::vector<std::string> fonts_below(const std::string& folder) {
  std::vector<std::string> found;
  std::error_code error;
  const auto options = fs::directory_options::skip_permission_denied;
  for (auto entry = fs::recursive_directory_iterator(folder, options, error);
       !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (is_font(entry->path()) && entry->is_regular_file(error)) found.push_back(entry->path().string());
  }
  std::ranges::sort(
      found, {}, [](const std::string& path) { return std::pair(fs::path(path).filename().string(), path); });
  return found;
}

std::vector<std::string> system_fonts() {
  std::vector<std::string> found = fonts_below("/usr/share/fonts");
  for (std::string& path : fonts_below("/usr/local/share/fonts")) found.push_back(std::move(path));
  std::ranges::sort(
      found, {}, [](const std::string& path) { return std::pair(fs::path(path).filename().string(), path); });
  return found;
}

MadeDigits make_digits(const DigitOptions& options) {
  check_digit_options(options);
  const DigitPainter painter(options.fonts);
  Json record = recipe(options, painter);
  MadeDigits made{.train = options.train, .test = options.test, .fonts = painter.fonts(), .digest = {}};
  made.digest = digest_there(options.folder, record);
  made.was_there = !made.digest.empty();
  if (made.was_there) return made;
  Press press(options, painter.files());
  DigitFolder folder(options.folder);
  write_file_atomic(options.folder + "/" + kDigitsRecord, record.dump(2) + "\n");
  options.format == DigitFormat::kMnist ? write_mnist(options, press, folder)
                                        : write_cifar(options, press, folder);
  made.digest = record["digest"] = folder.digest();
  write_file_atomic(options.folder + "/" + kDigitsRecord, record.dump(2) + "\n");
  return made;
}

}  // namespace trireme::data
