#include "trireme/data/images/digits.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"
#include "trireme/data/images/set.h"

namespace trireme::data {
namespace {

using testing::message_of;
using testing::Scratch;
using testing::slurp;

class Digits : public ::testing::Test {
 protected:
  void SetUp() override {
    if (system_fonts().empty()) GTEST_SKIP() << "this system has no fonts";
  }

  DigitOptions options(const std::string& folder, DigitFormat format) const {
    return {.folder = scratch_.path(folder),
            .format = format,
            .train = 200,
            .test = 50,
            .seed = 3,
            .fonts = system_fonts()};
  }

  Scratch scratch_;
};

std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    files[entry.path().filename().string()] = slurp(entry.path().string());
  return files;
}

void expect_each_equally_often(const ImageSet& images) {
  std::map<int64_t, int64_t> counts;
  for (int64_t i = 0; i < images.size(); ++i) ++counts[images.label(i)];
  ASSERT_EQ(counts.size(), 10U);
  for (const auto& [label, count] : counts) EXPECT_EQ(count, images.size() / 10) << label;
}

TEST_F(Digits, HaveTheFilesOfCifar) {
  const MadeDigits made = make_digits(options("made", DigitFormat::kCifar10));
  EXPECT_FALSE(made.was_there);
  const auto files = contents(scratch_.path("made"));
  EXPECT_EQ(files.size(), 8U);
  for (int batch = 1; batch <= 5; ++batch)
    EXPECT_EQ(files.at(fmt::format("data_batch_{}.bin", batch)).size(), 40U * 3073U);
  EXPECT_EQ(files.at("test_batch.bin").size(), 50U * 3073U);
  const ImageSplits splits = open_images({.path = scratch_.path("made")});
  EXPECT_EQ(splits.format, "CIFAR-10");
  EXPECT_EQ(splits.train->classes()[7], "seven");
  expect_each_equally_often(*splits.train);
  expect_each_equally_often(*splits.val);
}

TEST_F(Digits, HaveTheFilesOfMnist) {
  make_digits(options("made", DigitFormat::kMnist));
  const ImageSplits splits = open_images({.path = scratch_.path("made")});
  EXPECT_EQ(splits.format, "idx");
  EXPECT_EQ(splits.train->shape(), (ImageShape{1, 28, 28}));
  EXPECT_EQ(splits.train->size(), 200);
  expect_each_equally_often(*splits.train);
  expect_each_equally_often(*splits.val);
}

TEST_F(Digits, DependOnSeedAndPlaceAloneAndNotOnThreads) {
  DigitOptions one = options("one", DigitFormat::kMnist);
  DigitOptions four = options("four", DigitFormat::kMnist);
  four.threads = 4;
  DigitOptions other = options("other", DigitFormat::kMnist);
  other.seed = 4;
  const MadeDigits made = make_digits(one);
  EXPECT_EQ(make_digits(four).digest, made.digest);
  EXPECT_NE(make_digits(other).digest, made.digest);
  EXPECT_EQ(contents(scratch_.path("one")), contents(scratch_.path("four")));
}

TEST_F(Digits, AreMadeOnceAndMixedWithNothing) {
  DigitOptions wanted = options("made", DigitFormat::kMnist);
  const MadeDigits made = make_digits(wanted);
  const MadeDigits again = make_digits(wanted);
  EXPECT_TRUE(again.was_there);
  EXPECT_EQ(again.digest, made.digest);
  wanted.seed = 8;
  EXPECT_NE(
      message_of<ConfigError>([&] { make_digits(wanted); }).find("other counts, another seed or other fonts"),
      std::string::npos);
  wanted.folder = scratch_.path("taken");
  scratch_.write("taken/data_batch_1.bin", "somebody's");
  EXPECT_NE(message_of<ConfigError>([&] { make_digits(wanted); }).find("has other files"), std::string::npos);
  EXPECT_EQ(slurp(scratch_.path("taken/data_batch_1.bin")), "somebody's");
}

TEST_F(Digits, GivenUpHalfWayAreMadeAnew) {
  DigitOptions wanted = options("made", DigitFormat::kMnist);
  DigitOptions given_up = wanted;
  given_up.on_progress = [](int64_t done, int64_t) {
    if (done > 200) throw std::runtime_error("enough");
  };
  EXPECT_THROW(make_digits(given_up), std::runtime_error);
  const MadeDigits made = make_digits(wanted);
  EXPECT_FALSE(made.was_there);
  EXPECT_EQ(make_digits(options("elsewhere", DigitFormat::kMnist)).digest, made.digest);
}

/// The share of pixels that differ from the median pixel of the picture by more than a third of its range.
double ink_share(const Image& image) {
  int64_t inked = 0;
  for (const uint8_t pixel : image.pixels) inked += pixel > 128 ? 1 : 0;
  return static_cast<double>(inked) / static_cast<double>(image.pixels.size());
}

TEST_F(Digits, AreSeenWholeInTheirPictures) {
  DigitPainter painter(system_fonts());
  for (int64_t i = 0; i < 300; ++i) {
    SampleDraws draws(1, 0, i);
    const Image image = painter.draw(i % 10, DigitFormat::kMnist, draws);
    ASSERT_EQ(image.shape, (ImageShape{1, 28, 28}));
    EXPECT_GT(ink_share(image), 0.02) << i;
    EXPECT_LT(ink_share(image), 0.5) << i;
    int64_t border = 0;
    for (int64_t x = 0; x < 28; ++x) border += image.pixels[static_cast<size_t>(x)] > 128 ? 1 : 0;
    EXPECT_EQ(border, 0) << i;  // nothing is cut off above
  }
}

TEST(DigitFonts, AreAskedForWhereThereAreNone) {
  const Scratch scratch;
  scratch.write("broken.ttf", "no font");
  EXPECT_EQ(fonts_below(scratch.path("")).size(), 1U);
  const auto make = [&] {
    make_digits({.folder = scratch.path("made"), .fonts = fonts_below(scratch.path(""))});
  };
  EXPECT_NE(message_of<ConfigError>(make).find("none of 1 font files has all ten digits"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(scratch.path("made")));
}

TEST(DigitCounts, HaveALeast) {
  const auto make = [] { make_digits({.folder = "/tmp/no", .train = 9, .fonts = {}}); };
  EXPECT_NE(message_of<ConfigError>(make).find("--train is 9, but must be from 10"), std::string::npos);
}

}  // namespace
}  // namespace trireme::data
