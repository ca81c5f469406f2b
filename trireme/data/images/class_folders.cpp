// Folders of JPEG and PNG files, one for each class.
#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <map>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/data/held_out.h"
#include "trireme/data/images/codec.h"
#include "trireme/data/images/set.h"

namespace trireme::data {
namespace {

namespace fs = std::filesystem;

/// Names of the files of each class below a root, each relative to it.
using FilesByClass = std::map<std::string, std::vector<std::string>>;

bool is_hidden(const fs::path& path) {
  return path.filename().string().starts_with(".");
}

bool has_image_name(const fs::path& path) {
  std::string ending = path.extension().string();
  std::ranges::transform(ending, ending.begin(), [](unsigned char c) { return std::tolower(c); });
  constexpr std::array<std::string_view, 3> kEndings = {".jpg", ".jpeg", ".png"};
  return std::ranges::find(kEndings, ending) != kEndings.end();
}

/// Links to files are followed, for large sets are often made of them; links to folders only where they
/// stand for a class.
std::vector<std::string> images_below(const fs::path& root, const std::string& name) {
  std::vector<std::string> files;
  auto entry = fs::recursive_directory_iterator(root / name);
  for (; entry != fs::recursive_directory_iterator(); ++entry) {
    if (is_hidden(entry->path())) {
      entry.disable_recursion_pending();
    } else if (has_image_name(entry->path()) && entry->is_regular_file()) {
      files.push_back(entry->path().lexically_relative(root).string());
    }
  }
  std::ranges::sort(files);
  return files;
}

FilesByClass list_classes(const fs::path& root) {
  FilesByClass found;
  for (const auto& entry : fs::directory_iterator(root)) {
    if (is_hidden(entry.path()) || !entry.is_directory()) continue;
    const std::string name = entry.path().filename().string();
    found[name] = images_below(root, name);
  }
  return found;
}

void check_none_empty(const FilesByClass& found, const fs::path& root) {
  for (const auto& [name, files] : found) {
    if (!files.empty()) continue;
    throw DataError(
        "[data.images] {} has no JPEG or PNG file, so this class has no images; add some or remove the "
        "folder",
        (root / name).string());
  }
}

class FolderSet : public ImageSet {
 public:
  FolderSet(fs::path root, const FilesByClass& files, int64_t channels)
      : root_(std::move(root)), channels_(channels) {
    if (channels != 1 && channels != 3) {
      throw ConfigError(
          "[data.images] images in {} are read as grayscale or RGB, but model.channels={}; set "
          "model.channels=1 or 3",
          root_.string(), channels);
    }
    for (const auto& [name, names] : files) {
      for (const std::string& file : names) {
        files_.push_back(file);
        labels_.push_back(static_cast<int32_t>(classes_.size()));
      }
      classes_.push_back(name);
    }
  }

  Image read(int64_t index, int64_t least_side) const override { return read_part(index, least_side, {}); }

  Image read_part(int64_t index, int64_t least_side, const PartChooser& choose) const override {
    return decode_image(open(index).bytes(),
                        {.channels = channels_, .least_side = least_side, .part = choose});
  }

  std::string name(int64_t index) const override {
    return (root_ / files_[static_cast<size_t>(index)]).string();
  }

 private:
  MappedFile open(int64_t index) const {
    try {
      return MappedFile(name(index));
    } catch (const EnvironmentError& error) {
      throw BrokenImage(error.what());
    }
  }

  fs::path root_;
  int64_t channels_;
  std::vector<std::string> files_;
};

/// Throws when a class of `has` has no folder below `root`.
void check_classes(const FilesByClass& has, const FilesByClass& found, const fs::path& root) {
  for (const auto& [name, files] : has) {
    if (found.contains(name)) continue;
    throw DataError(
        "[data.images] class {} has no folder in {}; training and validation need the same classes", name,
        root.string());
  }
}

/// The images of each class with the lowest draws; a class keeps at least one for training.
FilesByClass hold_out(FilesByClass& train, double fraction) {
  FilesByClass held;
  for (auto& [name, files] : train) {
    const auto wanted = static_cast<size_t>(fraction * static_cast<double>(files.size()) + 0.5);
    std::ranges::sort(files, {}, [](const std::string& file) { return held_out_draw(file, 0); });
    const auto end = files.begin() + static_cast<int64_t>(std::min(wanted, files.size() - 1));
    held[name].assign(files.begin(), end);
    files.erase(files.begin(), end);
    std::ranges::sort(held[name]);
    std::ranges::sort(files);
  }
  return held;
}

int64_t count(const FilesByClass& found) {
  int64_t files = 0;
  for (const auto& [name, names] : found) files += static_cast<int64_t>(names.size());
  return files;
}

ImageSplits open_split_folders(const ImageOptions& options, const fs::path& root, const fs::path& val_root) {
  const FilesByClass train = list_classes(root / "train");
  check_none_empty(train, root / "train");
  ImageSplits splits{.train = std::make_shared<FolderSet>(root / "train", train, options.channels),
                     .val = nullptr,
                     .format = "folders",
                     .folder = options.path};
  if (val_root.empty()) return splits;
  const FilesByClass val = list_classes(val_root);
  check_none_empty(val, val_root);
  check_classes(train, val, val_root);
  check_classes(val, train, root / "train");
  splits.val = std::make_shared<FolderSet>(val_root, val, options.channels);
  return splits;
}

}  // namespace

std::optional<ImageSplits> open_class_folders(const ImageOptions& options) {
  const fs::path root = options.path;
  const auto is_split = [&](const char* name) {
    std::error_code ignored;
    return fs::is_directory(root / name, ignored) && count(list_classes(root / name)) > 0;
  };
  if (is_split("train")) {
    for (const char* val : {"val", "validation", "test"}) {
      if (is_split(val)) return open_split_folders(options, root, root / val);
    }
    return open_split_folders(options, root, {});
  }
  FilesByClass train = list_classes(root);
  if (count(train) == 0) return std::nullopt;
  check_none_empty(train, root);
  const FilesByClass held = hold_out(train, options.val_fraction);
  ImageSplits splits{.train = std::make_shared<FolderSet>(root, train, options.channels),
                     .val = nullptr,
                     .format = "folders",
                     .folder = options.path};
  if (count(held) > 0) splits.val = std::make_shared<FolderSet>(root, held, options.channels);
  return splits;
}

}  // namespace trireme::data
