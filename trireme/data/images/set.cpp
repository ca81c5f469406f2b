#include "trireme/data/images/set.h"

#include <filesystem>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::data {
namespace {

namespace fs = std::filesystem;

/// Folders that archives of known sets unpack to.
constexpr const char* kInside[] = {"", "cifar-10-batches-bin", "cifar-100-binary", "MNIST/raw", "raw"};

std::optional<ImageSplits> open_packed(const std::string& folder) {
  if (auto found = open_cifar(folder)) return found;
  return open_idx(folder);
}

}  // namespace

ImageSplits open_images(const ImageOptions& options) {
  std::error_code ignored;
  if (!fs::is_directory(options.path, ignored)) {
    throw ConfigError("[data.images] {} is not a folder; set data.path to one with CIFAR, idx or image files",
                      options.path);
  }
  for (const char* inside : kInside) {
    fs::path folder = (fs::path(options.path) / inside).lexically_normal();
    if (!folder.has_filename()) folder = folder.parent_path();  // no slash at the end
    if (!fs::is_directory(folder, ignored)) continue;
    if (auto found = open_packed(folder.string())) return std::move(*found);
  }
  try {
    if (auto found = open_class_folders(options)) return std::move(*found);
  } catch (const fs::filesystem_error& error) {
    throw EnvironmentError("[data.images] {} cannot be listed: {}", error.path1().string(),
                           error.code().message());
  }
  throw ConfigError(
      "[data.images] {} has no images: neither data_batch_1.bin (CIFAR-10), train.bin (CIFAR-100) nor "
      "train-images-idx3-ubyte (MNIST), nor a folder for each class of JPEG or PNG files; get a data set "
      "with 'trireme data make digits' or 'trireme data get'",
      options.path);
}

}  // namespace trireme::data
