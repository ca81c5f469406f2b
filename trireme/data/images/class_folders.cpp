// Folders of JPEG and PNG files, one for each class.
#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/data/held_out.h"
#include "trireme/data/images/codec.h"
#include "trireme/data/images/set.h"

namespace trireme::data {
namespace {

namespace fs = std::filesystem;

/// Names of the files of each class below a root, each relative to it.
using FilesByClass = std::map<std::string, std::vector<std::string>>;

/// The files in a folder of class folders.
struct Listing {
  FilesByClass classes;
  std::map<std::string, int64_t> left_out;  ///< files of classes that are not read, by what they are
  int64_t beside_classes = 0;               ///< pictures in the folder itself, which have no class
};

bool is_hidden(const fs::path& path) {
  return path.filename().string().starts_with(".");
}

std::string ending_of(const fs::path& path) {
  std::string ending = path.extension().string();
  std::ranges::transform(ending, ending.begin(), [](unsigned char c) { return std::tolower(c); });
  return ending;
}

/// The first bytes of a file without an ending tell what it is; one that cannot be opened is no picture.
bool begins_as_image(const fs::path& path) {
  std::array<char, 16> begin{};
  std::ifstream file(path, std::ios::binary);
  file.read(begin.data(), begin.size());
  return is_jpeg_or_png(std::as_bytes(std::span(begin.data(), static_cast<size_t>(file.gcount()))));
}

bool is_image(const fs::path& path) {
  const std::string ending = ending_of(path);
  if (ending.empty()) return begins_as_image(path);
  constexpr std::array<std::string_view, 5> kEndings = {".jpg", ".jpeg", ".jpe", ".jfif", ".png"};
  return std::ranges::find(kEndings, ending) != kEndings.end();
}

std::string kind_of(const fs::directory_entry& entry) {
  if (!entry.exists()) return "broken links";
  const std::string ending = ending_of(entry.path());
  return ending.empty() ? "without an ending" : ending;
}

/// Links to files are followed, for large sets are often made of them; links to folders only where they
/// stand for a class.
void list_class(const fs::path& root, const std::string& name, Listing& listing) {
  std::vector<std::string>& files = listing.classes[name];
  auto entry = fs::recursive_directory_iterator(root / name);
  for (; entry != fs::recursive_directory_iterator(); ++entry) {
    if (is_hidden(entry->path())) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file() && is_image(entry->path())) {
      files.push_back(entry->path().lexically_relative(root).string());
    } else if (!entry->is_directory()) {
      ++listing.left_out[kind_of(*entry)];
    }
  }
  std::ranges::sort(files);
}

Listing list_classes(const fs::path& root) {
  Listing listing;
  for (const auto& entry : fs::directory_iterator(root)) {
    if (is_hidden(entry.path())) continue;
    if (entry.is_directory()) list_class(root, entry.path().filename().string(), listing);
    if (entry.is_regular_file() && is_image(entry.path())) ++listing.beside_classes;
  }
  return listing;
}

bool holds_image(const fs::path& folder) {
  auto entry = fs::recursive_directory_iterator(folder);
  for (; entry != fs::recursive_directory_iterator(); ++entry) {
    if (is_hidden(entry->path())) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file() && is_image(entry->path())) {
      return true;
    }
  }
  return false;
}

/// Sentences for people about the files of `root` that are not read.
std::vector<std::string> notes_of(const fs::path& root, const Listing& listing) {
  std::vector<std::string> notes;
  int64_t files = 0;
  std::vector<std::string> kinds;
  for (const auto& [kind, count] : listing.left_out) {
    files += count;
    kinds.push_back(fmt::format("{} {}", with_commas(count), kind));
  }
  if (files > 0) {
    notes.push_back(
        fmt::format("{} below {} not read, for only JPEG and PNG are: {}; convert pictures among them to PNG",
                    files == 1 ? "1 file" : with_commas(files) + " files",
                    root.string() + (files == 1 ? " is" : " are"), join(kinds, ", ")));
  }
  if (const int64_t beside = listing.beside_classes; beside > 0) {
    notes.push_back(fmt::format("{} in {} not read, outside the folders of classes; move {} into one",
                                beside == 1 ? "1 picture" : with_commas(beside) + " pictures",
                                root.string() + (beside == 1 ? " is" : " are"), beside == 1 ? "it" : "them"));
  }
  return notes;
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

constexpr std::array<const char*, 3> kHeldOutFolders = {"val", "validation", "test"};

/// The first of val/, validation/ and test/ that holds pictures; empty: none does.
fs::path held_out_folder(const fs::path& root) {
  std::error_code ignored;
  for (const char* name : kHeldOutFolders) {
    if (fs::is_directory(root / name, ignored) && holds_image(root / name)) return root / name;
  }
  return {};
}

/// A class may be called "train": other folders with pictures are then beside it, and no held-out ones.
bool is_class_among_others(const fs::path& root) {
  if (!held_out_folder(root).empty()) return false;
  return std::ranges::any_of(fs::directory_iterator(root), [](const fs::directory_entry& entry) {
    return !is_hidden(entry.path()) && entry.path().filename() != "train" && entry.is_directory() &&
           holds_image(entry.path());
  });
}

void append(std::vector<std::string>& notes, std::vector<std::string> more) {
  std::ranges::move(more, std::back_inserter(notes));
}

void open_held_out(ImageSplits& splits, const FilesByClass& train, const fs::path& root, int64_t channels) {
  const fs::path folder = held_out_folder(root);
  if (folder.empty()) {
    splits.why_no_val = fmt::format(
        "{} has no pictures in val/, validation/ or test/; add such a folder with the classes of train/",
        root.string());
    return;
  }
  const Listing val = list_classes(folder);
  if (count(val.classes) == 0) {
    splits.why_no_val = fmt::format(
        "the {} of {} are in no folder of a class, so their classes are unknown; sort them into {}/CLASS/, "
        "with the classes of train/",
        val.beside_classes == 1 ? "picture" : with_commas(val.beside_classes) + " pictures", folder.string(),
        folder.string());
    return;
  }
  check_none_empty(val.classes, folder);
  check_classes(train, val.classes, folder);
  check_classes(val.classes, train, root / "train");
  append(splits.notes, notes_of(folder, val));
  splits.val = std::make_shared<FolderSet>(folder, val.classes, channels);
}

ImageSplits open_split_folders(const ImageOptions& options, const fs::path& root, const Listing& train) {
  check_none_empty(train.classes, root / "train");
  ImageSplits splits{.train = std::make_shared<FolderSet>(root / "train", train.classes, options.channels),
                     .val = nullptr,
                     .format = "folders",
                     .folder = options.path,
                     .notes = notes_of(root / "train", train)};
  open_held_out(splits, train.classes, root, options.channels);
  return splits;
}

std::string why_none_held_out(const ImageOptions& options) {
  if (options.val_fraction == 0.0) return {};  // as asked for
  return fmt::format(
      "data.val_fraction={} of the images of each class in {} is less than half an image, or a class has one "
      "image only; raise it, or set train.val_batches=0",
      options.val_fraction, options.path);
}

}  // namespace

std::optional<ImageSplits> open_class_folders(const ImageOptions& options) {
  const fs::path root = options.path;
  std::error_code ignored;
  if (fs::is_directory(root / "train", ignored)) {
    const Listing train = list_classes(root / "train");
    if (count(train.classes) > 0 && !is_class_among_others(root))
      return open_split_folders(options, root, train);
  }
  Listing all = list_classes(root);
  if (count(all.classes) == 0) {
    const std::vector<std::string> notes = notes_of(root, all);
    if (notes.empty()) return std::nullopt;
    throw ConfigError("[data.images] {} has no JPEG or PNG file in the folder of a class: {}", root.string(),
                      join(notes, "; "));
  }
  check_none_empty(all.classes, root);
  ImageSplits splits{.train = nullptr,
                     .val = nullptr,
                     .format = "folders",
                     .folder = options.path,
                     .notes = notes_of(root, all)};
  const FilesByClass held = hold_out(all.classes, options.val_fraction);
  splits.train = std::make_shared<FolderSet>(root, all.classes, options.channels);
  if (count(held) > 0) {
    splits.val = std::make_shared<FolderSet>(root, held, options.channels);
  } else {
    splits.why_no_val = why_none_held_out(options);
  }
  return splits;
}

}  // namespace trireme::data
