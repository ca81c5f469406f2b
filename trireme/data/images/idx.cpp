// The idx files of MNIST (LeCun, Cortes and Burges): a big-endian header and bytes, packed by gzip or not.
#include <algorithm>
#include <filesystem>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/data/images/gzip.h"
#include "trireme/data/images/set.h"

namespace trireme::data {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostIdxBytes = int64_t{1} << 32;
constexpr int64_t kMostSide = 1 << 14;

struct IdxFile {
  std::string path;
  std::vector<int64_t> dims;
  std::string bytes;  ///< with the header
  size_t header = 0;
};

uint32_t big_endian(const std::string& bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

/// Bytes with so many dimensions.
IdxFile read_idx(const std::string& path, size_t dims) {
  IdxFile file{.path = path, .dims = {}, .bytes = read_unpacked(path, kMostIdxBytes), .header = 4 + 4 * dims};
  if (file.bytes.size() < file.header)
    throw DataError("[data.idx] {} ends within its header, after {} bytes; download it again", path,
                    file.bytes.size());
  constexpr uint32_t kBytes = 0x0800;
  if (big_endian(file.bytes, 0) != (kBytes | dims)) {
    throw DataError("[data.idx] {} begins with {:#010x} instead of {:#010x} (bytes in {} dimensions)", path,
                    big_endian(file.bytes, 0), kBytes | static_cast<uint32_t>(dims), dims);
  }
  int64_t bytes = 1;
  for (size_t dim = 0; dim < dims; ++dim) {
    file.dims.push_back(big_endian(file.bytes, 4 + 4 * dim));
    if (dim > 0 && (file.dims[dim] < 1 || file.dims[dim] > kMostSide))
      throw DataError("[data.idx] {} says that an image side has {} pixels, which is out of range", path,
                      file.dims[dim]);
    bytes *= file.dims[dim];  // below 2^32 * 2^28
  }
  const auto held = static_cast<int64_t>(file.bytes.size() - file.header);
  if (held != bytes) {
    throw DataError("[data.idx] {} should have {} bytes ({}) but has {}; download it again", path, bytes,
                    fmt::join(file.dims, " x "), held);
  }
  return file;
}

class IdxSet : public ImageSet {
 public:
  /// `classes` of the training split; 0: this is it.
  IdxSet(IdxFile images, const IdxFile& labels, int64_t classes) : images_(std::move(images)) {
    if (images_.dims[0] != labels.dims[0] || images_.dims[0] == 0) {
      throw DataError("[data.idx] {} has {} images but {} has {} labels; each image needs one", images_.path,
                      images_.dims[0], labels.path, labels.dims[0]);
    }
    shape_ = ImageShape{.channels = 1, .height = images_.dims[1], .width = images_.dims[2]};
    for (size_t at = labels.header; at < labels.bytes.size(); ++at)
      labels_.push_back(static_cast<uint8_t>(labels.bytes[at]));
    const int32_t last = *std::ranges::max_element(labels_);
    if (classes == 0) {
      classes = last + 1;
    } else if (last >= classes) {
      throw DataError("[data.idx] image {} of {} has label {}, but training labels end at {}",
                      std::ranges::find(labels_, last) - labels_.begin(), labels.path, last, classes - 1);
    }
    for (int64_t label = 0; label < classes; ++label) classes_.push_back(std::to_string(label));
  }

  Image read(int64_t index, int64_t) const override {
    const auto bytes = static_cast<size_t>(shape_->height * shape_->width);
    const auto* begin = reinterpret_cast<const uint8_t*>(images_.bytes.data()) + images_.header +
                        static_cast<size_t>(index) * bytes;
    return {.shape = *shape_, .pixels = {begin, begin + bytes}};
  }

  std::string name(int64_t index) const override {
    return fmt::format("image {} of {}", index, images_.path);
  }

  /// Labels below the highest that no image has; the files do not say how many classes there are.
  std::vector<std::string> empty_classes() const {
    std::vector<std::string> absent = classes_;
    for (const int32_t label : labels_) absent[static_cast<size_t>(label)].clear();
    std::erase(absent, "");
    return absent;
  }

 private:
  const IdxFile images_;
};

/// The path of the file, named as on MNIST's own site or as by some unpackers, packed or not; empty: not
/// there.
std::string find_idx(const std::string& folder, const std::string& split, const std::string& what,
                     int64_t dims) {
  for (const char* dot : {"-", "."}) {
    for (const char* packing : {"", ".gz"}) {
      const std::string path =
          fmt::format("{}/{}-{}{}idx{}-ubyte{}", folder, split, what, dot, dims, packing);
      std::error_code ignored;
      if (fs::is_regular_file(path, ignored)) return path;
    }
  }
  return {};
}

std::shared_ptr<IdxSet> open_split(const std::string& folder, const std::string& split, int64_t classes) {
  const std::string images = find_idx(folder, split, "images", 3);
  const std::string labels = find_idx(folder, split, "labels", 1);
  if (images.empty() && labels.empty()) return nullptr;
  if (images.empty() || labels.empty()) {
    throw DataError("[data.idx] {} exists, but no {}-{}-ubyte beside it; download both",
                    images.empty() ? labels : images, split, images.empty() ? "images-idx3" : "labels-idx1");
  }
  return std::make_shared<IdxSet>(read_idx(images, 3), read_idx(labels, 1), classes);
}

/// Notes on classes without images: EMNIST's letters have them, whose labels begin at 1, and parts of a set.
std::vector<std::string> notes_of(const IdxSet& train, const std::string& folder) {
  std::vector<std::string> absent = train.empty_classes();
  if (absent.empty()) return {};
  constexpr size_t kNamed = 8;
  if (absent.size() > kNamed) {
    absent.resize(kNamed);
    absent.emplace_back("...");
  }
  return {fmt::format("training labels in {} go up to {}, so there are {} classes, but no image has label {}",
                      folder, train.classes().back(), train.classes().size(), join(absent, ", "))};
}

}  // namespace

std::optional<ImageSplits> open_idx(const std::string& folder) {
  const auto train = open_split(folder, "train", 0);
  if (!train) return std::nullopt;
  const auto test = open_split(folder, "t10k", static_cast<int64_t>(train->classes().size()));
  if (test && test->shape() != train->shape()) {
    throw DataError("[data.idx] {} has training images of {} but test images of {}; both must have one size",
                    folder, train->shape()->to_string(), test->shape()->to_string());
  }
  return ImageSplits{
      .train = train,
      .val = test,
      .format = "idx",
      .folder = folder,
      .notes = notes_of(*train, folder),
      .why_no_val = test ? "" : folder + " has no t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"};
}

}  // namespace trireme::data
