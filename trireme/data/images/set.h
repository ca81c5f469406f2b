#pragma once
// Labelled images on disk: CIFAR-10 and CIFAR-100 as binary files, MNIST and its kin as idx files, folders of
// JPEG and PNG by class.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/data/images/image.h"

namespace trireme::data {

/// One split. Thread-safe.
class ImageSet {
 public:
  virtual ~ImageSet() = default;
  ImageSet(const ImageSet&) = delete;
  ImageSet& operator=(const ImageSet&) = delete;

  int64_t size() const { return static_cast<int64_t>(labels_.size()); }
  /// Names of the classes, indexed by label.
  const std::vector<std::string>& classes() const { return classes_; }
  int64_t label(int64_t index) const { return labels_[static_cast<size_t>(index)]; }
  /// The shape that all images have; none: their shapes differ.
  const std::optional<ImageShape>& shape() const { return shape_; }
  /// Decodes image `index`: at a smaller size where its format allows that and both sides keep `least_side`
  /// pixels, which saves time (0: at full size). Throws BrokenImage when the file of one image of many cannot
  /// be read.
  virtual Image read(int64_t index, int64_t least_side = 0) const = 0;
  /// Decodes a part of the image: `choose` is called once, with the shape that read() gives. Throws as
  /// read().
  virtual Image read_part(int64_t index, int64_t least_side, const PartChooser& choose) const {
    Image image = read(index, least_side);
    const ImagePart part = choose(image.shape);
    return cut(std::move(image), part);
  }
  /// The image's name in messages: a file, or a place in one.
  virtual std::string name(int64_t index) const = 0;

 protected:
  ImageSet() = default;
  std::vector<std::string> classes_;
  std::vector<int32_t> labels_;
  std::optional<ImageShape> shape_;
};

struct ImageSplits {
  std::shared_ptr<const ImageSet> train;
  std::shared_ptr<const ImageSet> val;  ///< none: nothing is held out
  std::string format;                   ///< "CIFAR-10", "CIFAR-100", "idx" or "folders"
  std::string folder;                   ///< where the files were found, inside what was asked for
  /// Sentences for people about files that are not read and classes without images, with what to do.
  std::vector<std::string> notes = {};
  std::string why_no_val = {};  ///< why there is no `val` although one was asked for; empty: none was
};

struct ImageOptions {
  std::string path = {};
  double val_fraction = 0.0;  ///< of the images of each class, where folders have no split of their own
  int64_t channels = 3;       ///< of images in folders: 1 or 3
};

/// Opens the images below `path` in whichever format they are: data_batch_1.bin and so on; train.bin;
/// train-images-idx3-ubyte, packed or not; train/CLASS/ with val/CLASS/ or test/CLASS/; CLASS/. Also one
/// folder deeper where archives put it. A folder train/ is a class where other folders with pictures, and no
/// val/, validation/ or test/, are beside it. Throws ConfigError when it holds none of these, and DataError
/// naming file and place when files are cut off, have other sizes than they say, labels out of range, class
/// folders without images or splits of other classes.
ImageSplits open_images(const ImageOptions& options);

// Each opens one format; none: `folder` holds no images of that format.
std::optional<ImageSplits> open_cifar(const std::string& folder);
std::optional<ImageSplits> open_idx(const std::string& folder);
std::optional<ImageSplits> open_class_folders(const ImageOptions& options);

}  // namespace trireme::data
