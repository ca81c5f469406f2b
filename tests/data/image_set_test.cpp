#include "trireme/data/images/set.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <set>

#include "tests/data/image_files.h"
#include "tests/data/scratch.h"
#include "trireme/base/error.h"
#include "trireme/data/images/codec.h"
#include "trireme/data/images/gzip.h"

namespace trireme::data {
namespace {

using testing::cifar_record;
using testing::idx_header;
using testing::idx_images;
using testing::idx_labels;
using testing::message_of;
using testing::pattern_image;
using testing::Scratch;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

template <typename E>
void expect_refusal(const Scratch& scratch, const std::string& part, const ImageOptions& more = {}) {
  ImageOptions options = more;
  options.path = scratch.path("");
  const std::string message = message_of<E>([&] { open_images(options); });
  EXPECT_TRUE(has(message, part)) << message;
}

void expect_pattern(const ImageSet& images, int64_t place, int64_t index, const ImageShape& shape) {
  const Image image = images.read(place);
  EXPECT_EQ(image.shape, shape);
  EXPECT_EQ(image.pixels, pattern_image(index, shape).pixels) << images.name(place);
}

// CIFAR

TEST(CifarSet, TurnsPlanesIntoPixelsAcrossFiles) {
  const Scratch scratch;
  scratch.write("data_batch_1.bin", cifar_record(0, {3}) + cifar_record(1, {9}));
  scratch.write("data_batch_2.bin", cifar_record(2, {0}));
  scratch.write("test_batch.bin", cifar_record(3, {7}));
  const ImageSplits splits = open_images({.path = scratch.path("")});
  EXPECT_EQ(splits.format, "CIFAR-10");
  ASSERT_EQ(splits.train->size(), 3);
  for (int64_t i = 0; i < 3; ++i) expect_pattern(*splits.train, i, i, {3, 32, 32});
  EXPECT_EQ(splits.train->label(0), 3);
  EXPECT_EQ(splits.train->label(1), 9);
  EXPECT_EQ(splits.train->label(2), 0);
  EXPECT_TRUE(has(splits.train->name(2), "image 0 of ") && has(splits.train->name(2), "data_batch_2.bin"));
  ASSERT_EQ(splits.val->size(), 1);
  expect_pattern(*splits.val, 0, 3, {3, 32, 32});
  EXPECT_EQ(splits.val->classes().size(), 10U);
}

TEST(CifarSet, IsFoundInTheFolderOfItsArchiveAndNamesItsClasses) {
  const Scratch scratch;
  scratch.write("cifar-10-batches-bin/data_batch_1.bin", cifar_record(0, {2}));
  scratch.write("cifar-10-batches-bin/batches.meta.txt", "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n\n");
  const ImageSplits splits = open_images({.path = scratch.path("")});
  EXPECT_EQ(splits.train->classes()[2], "c");
  EXPECT_EQ(splits.val, nullptr);
}

TEST(CifarSet, OfAHundredClassesHasTheFineLabel) {
  const Scratch scratch;
  scratch.write("train.bin", cifar_record(5, {19, 99}));
  const ImageSplits splits = open_images({.path = scratch.path("")});
  EXPECT_EQ(splits.format, "CIFAR-100");
  EXPECT_EQ(splits.train->label(0), 99);
  expect_pattern(*splits.train, 0, 5, {3, 32, 32});
}

TEST(CifarSet, RefusesDamage) {
  const Scratch scratch;
  scratch.write("data_batch_1.bin", cifar_record(0, {3}) + cifar_record(1, {10}));
  expect_refusal<DataError>(scratch, "image 1 of " + scratch.path("data_batch_1.bin") + " has label 10");
  scratch.write("data_batch_1.bin", cifar_record(0, {3}).substr(1));
  expect_refusal<DataError>(scratch, "has 3072 bytes, which is not a multiple of the 3073");
  scratch.write("data_batch_1.bin", "");
  expect_refusal<DataError>(scratch, "has 0 bytes");
  scratch.write("data_batch_1.bin", cifar_record(0, {3}));
  scratch.write("data_batch_3.bin", cifar_record(0, {3}));
  expect_refusal<DataError>(scratch, scratch.path("data_batch_2.bin") + " does not");
  std::filesystem::remove(scratch.path("data_batch_3.bin"));
  scratch.write("batches.meta.txt", "cat\ndog\n");
  expect_refusal<DataError>(scratch, "names 2 classes, but CIFAR-10 has 10");
}

// idx

void write_mnist(const Scratch& scratch) {
  scratch.write("train-images-idx3-ubyte", idx_images(3, 5, 4));
  scratch.write("train-labels-idx1-ubyte", idx_labels({1, 0, 2}));
}

TEST(IdxSet, ReadsImagesAndLabels) {
  const Scratch scratch;
  write_mnist(scratch);
  scratch.write("t10k-images-idx3-ubyte", idx_images(1, 5, 4));
  scratch.write("t10k-labels-idx1-ubyte", idx_labels({2}));
  const ImageSplits splits = open_images({.path = scratch.path("")});
  EXPECT_EQ(splits.format, "idx");
  EXPECT_EQ(splits.train->shape(), (ImageShape{1, 5, 4}));
  ASSERT_EQ(splits.train->size(), 3);
  for (int64_t i = 0; i < 3; ++i) expect_pattern(*splits.train, i, i, {1, 5, 4});
  EXPECT_EQ(splits.train->label(2), 2);
  EXPECT_EQ(splits.val->label(0), 2);
  EXPECT_EQ(splits.val->classes().size(), 3U);
}

TEST(IdxSet, ReadsPackedFilesAsPlainOnes) {
  const Scratch scratch;
  scratch.write("MNIST/raw/train-images-idx3-ubyte.gz", packed(idx_images(3, 5, 4)));
  scratch.write("MNIST/raw/train-labels-idx1-ubyte.gz", packed(idx_labels({1, 0, 2})));
  const ImageSplits splits = open_images({.path = scratch.path("")});
  for (int64_t i = 0; i < 3; ++i) expect_pattern(*splits.train, i, i, {1, 5, 4});
}

TEST(IdxSet, RefusesDamage) {
  const Scratch scratch;
  write_mnist(scratch);
  const auto with_images = [&](const std::string& bytes, const std::string& part) {
    scratch.write("train-images-idx3-ubyte", bytes);
    expect_refusal<DataError>(scratch, part);
  };
  const std::string whole = idx_images(3, 5, 4);
  with_images(idx_labels({1, 0, 2}) + std::string(20, '\0'), "begins with 0x00000801 instead of 0x00000803");
  with_images(whole.substr(0, 10), "ends within its header, after 10 bytes");
  with_images(whole.substr(0, whole.size() - 1), "should have 60 bytes (3 x 5 x 4) but has 59");
  with_images(whole + "x", "but has 61");
  with_images(idx_header(0x803, {3, 0, 4}), "0 pixels, which is out of range");
  with_images(idx_header(0x803, {0xffffffffU, 0xffffffffU, 0xffffffffU}), "pixels, which is out of range");
  with_images(idx_images(2, 5, 4), "has 2 images");
  const std::string gz = packed(whole);
  with_images(gz.substr(0, gz.size() - 9), "is truncated");
  std::string damaged = gz;
  damaged[damaged.size() - 6] ^= 0x55;  // of the checksum
  with_images(damaged, "is damaged");
}

TEST(IdxSet, RefusesLabelsThatCannotBe) {
  const Scratch scratch;
  write_mnist(scratch);
  scratch.write("t10k-images-idx3-ubyte", idx_images(1, 5, 4));
  expect_refusal<DataError>(scratch, "but no t10k-labels-idx1-ubyte");
  scratch.write("t10k-labels-idx1-ubyte", idx_labels({3}));
  expect_refusal<DataError>(scratch, "has label 3, but training labels end at 2");
  scratch.write("t10k-labels-idx1-ubyte", idx_labels({0}));
  scratch.write("t10k-images-idx3-ubyte", idx_images(1, 4, 5));
  expect_refusal<DataError>(scratch, "training images of 1 x 5 x 4 but test images of 1 x 4 x 5");
}

/// Letters of EMNIST have labels 1 to 26; a part of a set may lack any.
TEST(IdxSet, KeepsClassesWithoutImagesAndNamesThem) {
  const Scratch scratch;
  write_mnist(scratch);
  EXPECT_TRUE(open_images({.path = scratch.path("")}).notes.empty());
  scratch.write("train-labels-idx1-ubyte", idx_labels({1, 4, 2}));
  const ImageSplits splits = open_images({.path = scratch.path("")});
  EXPECT_EQ(splits.train->classes(), (std::vector<std::string>{"0", "1", "2", "3", "4"}));
  EXPECT_EQ(splits.train->label(1), 4);
  ASSERT_EQ(splits.notes.size(), 1U);
  EXPECT_TRUE(has(splits.notes[0], "go up to 4, so there are 5 classes, but no image has label 0, 3"))
      << splits.notes[0];
  EXPECT_TRUE(has(splits.why_no_val, "has no t10k-images-idx3-ubyte")) << splits.why_no_val;
}

TEST(Unpacking, StopsAtItsLimitAndReadsSeveralMembers) {
  const Scratch scratch;
  const std::string text(1 << 20, 'a');
  scratch.write("bomb", packed(text));
  EXPECT_EQ(read_unpacked(scratch.path("bomb"), 1 << 20), text);
  EXPECT_TRUE(has(message_of<DataError>([&] { read_unpacked(scratch.path("bomb"), (1 << 20) - 1); }),
                  "unpacks to more than 1048575 bytes"));
  scratch.write("two", packed("left ") + packed("right"));
  EXPECT_EQ(read_unpacked(scratch.path("two"), 100), "left right");
  scratch.write("padded", packed("left") + std::string(700, '\0'));
  EXPECT_EQ(read_unpacked(scratch.path("padded"), 100), "left") << "as gzip ignores blocks of a tape";
  scratch.write("stray", packed("left") + std::string(7, '\0') + "x");
  EXPECT_TRUE(has(message_of<DataError>([&] { read_unpacked(scratch.path("stray"), 100); }),
                  "has bytes behind the end of its gzip data"));
}

// folders

void write_png(const Scratch& scratch, const std::string& name, int64_t index, int64_t channels = 3) {
  scratch.write(name, encode_png(pattern_image(index, {channels, 6, 5})));
}

TEST(FolderSet, HasAClassForEachFolder) {
  const Scratch scratch;
  write_png(scratch, "train/dog/b.png", 1);
  write_png(scratch, "train/dog/deep/er/a.PNG", 2);
  write_png(scratch, "train/cat/z.png", 0);
  write_png(scratch, "train/.hidden/z.png", 0);
  scratch.write("train/dog/readme.txt", "no image");
  write_png(scratch, "val/cat/x.png", 3);
  write_png(scratch, "val/dog/x.png", 4);
  const ImageSplits splits = open_images({.path = scratch.path("")});
  EXPECT_EQ(splits.format, "folders");
  EXPECT_EQ(splits.train->classes(), (std::vector<std::string>{"cat", "dog"}));
  ASSERT_EQ(splits.train->size(), 3);
  for (int64_t i = 0; i < 3; ++i) expect_pattern(*splits.train, i, i, {3, 6, 5});
  EXPECT_EQ(splits.train->label(0), 0);
  EXPECT_EQ(splits.train->label(2), 1);
  EXPECT_EQ(splits.train->shape(), std::nullopt);
  ASSERT_EQ(splits.val->size(), 2);
  expect_pattern(*splits.val, 1, 4, {3, 6, 5});
}

TEST(FolderSet, HoldsOutAShareOfEachClass) {
  const Scratch scratch;
  for (int64_t i = 0; i < 20; ++i) write_png(scratch, fmt::format("a/{}.png", i), i);
  for (int64_t i = 0; i < 10; ++i) write_png(scratch, fmt::format("b/{}.png", i), i);
  const ImageSplits splits = open_images({.path = scratch.path(""), .val_fraction = 0.2});
  EXPECT_EQ(splits.train->size(), 24);
  ASSERT_EQ(splits.val->size(), 6);
  std::set<std::string> names;
  for (const auto& split : {splits.train, splits.val}) {
    for (int64_t i = 0; i < split->size(); ++i) names.insert(split->name(i));
  }
  EXPECT_EQ(names.size(), 30U);
  EXPECT_EQ(splits.val->label(3), 0);
  EXPECT_EQ(splits.val->label(4), 1);
  EXPECT_EQ(open_images({.path = scratch.path("")}).val, nullptr);
}

TEST(FolderSet, RefusesClassesWithoutImagesAndOtherClasses) {
  const Scratch scratch;
  write_png(scratch, "train/cat/z.png", 0);
  std::filesystem::create_directories(scratch.path("train/dog"));
  expect_refusal<DataError>(scratch, scratch.path("train/dog") + " has no JPEG or PNG file");
  write_png(scratch, "train/dog/z.png", 0);
  write_png(scratch, "val/cat/z.png", 0);
  expect_refusal<DataError>(scratch, "class dog has no folder in " + scratch.path("val"));
  write_png(scratch, "val/dog/z.png", 0);
  write_png(scratch, "val/mouse/z.png", 0);
  expect_refusal<DataError>(scratch, "class mouse has no folder in " + scratch.path("train"));
}

TEST(FolderSet, ReadsWhateverIsAJpegOrPngAndCountsTheRest) {
  const Scratch scratch;
  const std::string png = encode_png(pattern_image(0, {3, 6, 5}));
  for (const char* name : {"a.jfif", "b.JPE", "c.png", "without-an-ending"})
    scratch.write(fmt::format("cat/{}", name), png);
  for (const char* name : {"a.webp", "b.webp", "deep/c.BMP", "README"})
    scratch.write(fmt::format("cat/{}", name), "no");
  scratch.write("loose.png", png);
  std::filesystem::create_symlink("nowhere", scratch.path("cat/gone.png"));
  const ImageSplits splits = open_images({.path = scratch.path("")});
  ASSERT_EQ(splits.train->size(), 4);
  for (int64_t i = 0; i < 4; ++i) expect_pattern(*splits.train, i, 0, {3, 6, 5});
  ASSERT_EQ(splits.notes.size(), 2U);
  EXPECT_TRUE(has(splits.notes[0], "5 files below " + scratch.path("") + " are not read")) << splits.notes[0];
  EXPECT_TRUE(has(splits.notes[0], ": 1 .bmp, 2 .webp, 1 broken links, 1 without an ending; convert"))
      << splits.notes[0];
  EXPECT_TRUE(has(splits.notes[1], "1 picture in " + scratch.path("") + " is not read")) << splits.notes[1];
  for (const char* name : {"a.jfif", "b.JPE", "c.png", "without-an-ending"})
    std::filesystem::remove(scratch.path(fmt::format("cat/{}", name)));
  expect_refusal<ConfigError>(scratch, "2 .webp");
}

TEST(FolderSet, SaysWhyNothingIsHeldOut) {
  const Scratch scratch;
  write_png(scratch, "train/cat/z.png", 0);
  EXPECT_TRUE(has(open_images({.path = scratch.path("")}).why_no_val, "has no pictures in val/"));
  write_png(scratch, "val/a.png", 0);
  write_png(scratch, "val/b.png", 0);
  write_png(scratch, "test/cat/a.png", 0);
  const ImageSplits flat = open_images({.path = scratch.path("")});
  EXPECT_EQ(flat.val, nullptr) << "test/ does not stand in for it";
  EXPECT_TRUE(
      has(flat.why_no_val, "the 2 pictures of " + scratch.path("val") + " are in no folder of a class"))
      << flat.why_no_val;
  const Scratch small;
  write_png(small, "cat/z.png", 0);
  EXPECT_TRUE(
      has(open_images({.path = small.path(""), .val_fraction = 0.1}).why_no_val, "data.val_fraction=0.1"));
  EXPECT_EQ(open_images({.path = small.path("")}).why_no_val, "") << "none was asked for";
}

TEST(FolderSet, TakesATrainForAClassAmongOthers) {
  const Scratch scratch;
  for (const char* name : {"bus", "car", "train"}) {
    write_png(scratch, fmt::format("{}/day/a.png", name), 0);
    write_png(scratch, fmt::format("{}/night/a.png", name), 1);
  }
  const ImageSplits classes = open_images({.path = scratch.path("")});
  EXPECT_EQ(classes.train->classes(), (std::vector<std::string>{"bus", "car", "train"}));
  EXPECT_EQ(classes.train->size(), 6);
  write_png(scratch, "val/day/a.png", 0);
  write_png(scratch, "val/night/a.png", 0);
  EXPECT_EQ(open_images({.path = scratch.path("")}).train->classes(),
            (std::vector<std::string>{"day", "night"}))
      << "a held-out folder makes train/ a split";
}

TEST(FolderSet, IsReadWithOneOrThreeChannels) {
  const Scratch scratch;
  write_png(scratch, "cat/a.png", 0);
  write_png(scratch, "dog/a.png", 1);
  for (const int64_t channels : {2, 4}) {
    const std::string message =
        message_of<ConfigError>([&] { open_images({.path = scratch.path(""), .channels = channels}); });
    EXPECT_NE(message.find(fmt::format("model.channels={};", channels)), std::string::npos) << message;
  }
  EXPECT_EQ(open_images({.path = scratch.path(""), .channels = 1}).train->read(0).shape.channels, 1);
}

TEST(FolderSet, TellsOfTheImageThatIsBroken) {
  const Scratch scratch;
  write_png(scratch, "cat/a.png", 0);
  const std::string whole = encode_jpeg(pattern_image(0, {3, 40, 40}), 90);
  scratch.write("cat/b.jpg", whole.substr(0, whole.size() / 2));
  scratch.write("cat/c.jpeg", "");
  const ImageSplits splits = open_images({.path = scratch.path("")});
  ASSERT_EQ(splits.train->size(), 3);
  EXPECT_NO_THROW(splits.train->read(0));
  EXPECT_THROW(splits.train->read(1), BrokenImage);
  EXPECT_THROW(splits.train->read(2), BrokenImage);
  std::filesystem::remove(scratch.path("cat/c.jpeg"));
  EXPECT_THROW(splits.train->read(2), BrokenImage);
}

TEST(ImageSets, NamesWhatItLookedFor) {
  const Scratch scratch;
  expect_refusal<ConfigError>(scratch, "neither data_batch_1.bin (CIFAR-10)");
  const std::string message = message_of<ConfigError>([&] { open_images({.path = scratch.path("no")}); });
  EXPECT_TRUE(has(message, "is not a folder")) << message;
}

}  // namespace
}  // namespace trireme::data
