#include "trireme/data/images/transform.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/data/image_files.h"
#include "trireme/base/error.h"

namespace trireme::data {
namespace {

using testing::pattern_image;

ImageTransform plain(const ImageShape& shape) {
  return {.shape = shape,
          .mean = std::vector<double>(static_cast<size_t>(shape.channels), 0.0),
          .deviation = std::vector<double>(static_cast<size_t>(shape.channels), 1.0 / 255.0)};
}

/// (C, H, W) of what transform_image() makes.
at::Tensor transformed(const Image& image, const ImageTransform& transform, SampleDraws draws) {
  const auto [channels, height, width] = transform.shape;
  const at::Tensor out = at::full({height, width, channels}, NAN).permute({2, 0, 1});
  transform_image(image, transform, draws,
                  {.values = out.mutable_data_ptr<float>(),
                   .channel = out.stride(0),
                   .row = out.stride(1),
                   .column = out.stride(2)});
  return out;
}

/// (C, H, W) fp32 of the pixels.
at::Tensor as_tensor(const Image& image) {
  const auto [channels, height, width] = image.shape;
  return at::from_blob(const_cast<uint8_t*>(image.pixels.data()), {height, width, channels}, at::kByte)
      .to(at::kFloat)
      .permute({2, 0, 1});
}

at::Tensor resized(const at::Tensor& part, int64_t height, int64_t width) {
  return at::_upsample_bilinear2d_aa(part.contiguous().unsqueeze(0), {height, width}, /*align_corners=*/false)
      .squeeze(0);
}

TEST(Transform, NormalisesAsItSays) {
  const Image image = pattern_image(5, {3, 4, 6});
  ImageTransform transform = plain({3, 4, 6});
  transform.mean = {0.4914, 0.4822, 0.4465};
  transform.deviation = {0.247, 0.243, 0.261};
  const at::Tensor mean = at::tensor(transform.mean).to(at::kDouble).view({3, 1, 1});
  const at::Tensor deviation = at::tensor(transform.deviation).to(at::kDouble).view({3, 1, 1});
  const at::Tensor expected = (as_tensor(image).to(at::kDouble) / 255.0 - mean) / deviation;
  EXPECT_TRUE(at::allclose(transformed(image, transform, {1, 2, 3}).to(at::kDouble), expected, 1e-5, 1e-6));
}

/// What a reader of transform.h would write: pad, cut out, mirror, one after the other.
TEST(Transform, PadsCropsAndFlipsAsTheNaiveWay) {
  const Image image = pattern_image(2, {3, 8, 7});
  ImageTransform transform = plain({3, 8, 7});
  transform.pad = 2;
  transform.flip = true;
  bool flipped_once = false, straight_once = false, moved_once = false;
  for (int64_t sample = 0; sample < 40; ++sample) {
    SampleDraws draws(9, 1, sample);
    const bool flip = draws.uniform() < 0.5;
    const int64_t down = draws.below(5) - 2, right = draws.below(5) - 2;
    at::Tensor expected = at::constant_pad_nd(as_tensor(image), {2, 2, 2, 2}, 0.0)
                              .slice(1, 2 - down, 10 - down)
                              .slice(2, 2 - right, 9 - right);
    if (flip) expected = expected.flip({2});
    EXPECT_TRUE(at::allclose(transformed(image, transform, {9, 1, sample}), expected, 0.0, 1e-4)) << sample;
    flipped_once |= flip;
    straight_once |= !flip;
    moved_once |= down != 0 && right != 0;
  }
  EXPECT_TRUE(flipped_once && straight_once && moved_once);
}

TEST(Transform, ResizesTheCentreAsPytorchDoes) {
  for (const auto& [height, width] : {std::pair<int64_t, int64_t>{30, 47}, {61, 20}, {16, 16}, {9, 11}}) {
    const Image image = pattern_image(4, {3, height, width});
    const ImageTransform transform = plain({3, 16, 16});
    const int64_t side = std::llround(0.875 * static_cast<double>(std::min(height, width)));
    const int64_t top = (height - side) / 2, left = (width - side) / 2;
    const at::Tensor part = as_tensor(image).slice(1, top, top + side).slice(2, left, left + side);
    const at::Tensor found = transformed(image, transform, {1, 1, 1});
    if (height == 16 && width == 16) {
      EXPECT_TRUE(at::allclose(found, as_tensor(image), 0.0, 1e-4));  // of its size already
    } else {
      EXPECT_TRUE(at::allclose(found, resized(part, 16, 16), 0.0, 2e-3)) << height << " x " << width;
    }
  }
}

/// Of a picture whose pixels say where they are, a crop tells its corners: they obey area and ratio.
TEST(Transform, DrawsCropsWithinAreaAndRatio) {
  Image image{.shape = {3, 100, 120}, .pixels = {}};
  for (int64_t y = 0; y < 100; ++y) {
    for (int64_t x = 0; x < 120; ++x) {
      for (const int64_t value : {y, x, int64_t{0}}) image.pixels.push_back(static_cast<uint8_t>(value));
    }
  }
  ImageTransform transform = plain({3, 20, 20});
  transform.resized_crop = true;
  transform.least_area = 0.25;
  double smallest = 1.0, largest = 0.0;
  for (int64_t sample = 0; sample < 300; ++sample) {
    const at::Tensor found = transformed(image, transform, {4, 0, sample});
    const auto span = [&](int64_t channel, int64_t axis) {
      const at::Tensor plane = found[channel];
      const at::Tensor first = plane.select(axis, 4).mean(), last = plane.select(axis, 15).mean();
      return (last - first).item<double>() * 20.0 / 11.0;  // from the inner rows, apart from the borders
    };
    const double height = span(0, 0), width = span(1, 1);
    const double area = height * width / 12000.0, ratio = width / height;
    EXPECT_GT(area, 0.25 * 0.95) << sample;
    EXPECT_LT(area, 1.0 * 1.05) << sample;
    EXPECT_GT(ratio, 0.75 * 0.94) << sample;
    EXPECT_LT(ratio, 1.0 / 0.75 * 1.06) << sample;
    smallest = std::min(smallest, area);
    largest = std::max(largest, area);
  }
  EXPECT_LT(smallest, 0.35);
  EXPECT_GT(largest, 0.8);
}

TEST(Transform, ResizesTheCropThatItDrewAsPytorchDoes) {
  const Image image = pattern_image(6, {1, 12, 12});
  ImageTransform transform = plain({1, 24, 24});
  transform.resized_crop = true;
  transform.least_area =
      1.0;  // all of the picture, when the ratio drawn allows it; else a part of the middle
  int64_t same = 0;
  for (int64_t sample = 0; sample < 200; ++sample) {
    const at::Tensor found = transformed(image, transform, {8, 0, sample});
    if (at::allclose(found, resized(as_tensor(image), 24, 24), 0.0, 2e-3)) ++same;
  }
  EXPECT_EQ(same, 200);  // a square picture: its middle of a ratio between 3/4 and 4/3 is itself
}

TEST(Transform, IsAFunctionOfSeedEpochAndSample) {
  const Image image = pattern_image(3, {3, 40, 40});
  ImageTransform transform = plain({3, 16, 16});
  transform.resized_crop = transform.flip = true;
  const at::Tensor found = transformed(image, transform, {1, 2, 3});
  EXPECT_TRUE(at::equal(found, transformed(image, transform, {1, 2, 3})));
  EXPECT_FALSE(at::equal(found, transformed(image, transform, {2, 2, 3})));
  EXPECT_FALSE(at::equal(found, transformed(image, transform, {1, 3, 3})));
  EXPECT_FALSE(at::equal(found, transformed(image, transform, {1, 2, 4})));
  const ImageTransform fixed = transform.fixed();
  EXPECT_TRUE(at::equal(transformed(image, fixed, {1, 2, 3}), transformed(image, fixed, {5, 6, 7})));
}

TEST(Transform, RefusesOtherChannels) {
  const Image image = pattern_image(3, {1, 4, 4});
  EXPECT_THROW(transformed(image, plain({3, 4, 4}), {1, 2, 3}), LogicError);
}

/// Beta(a, a) has mean 1/2 and variance 1 / (4 (2 a + 1)).
TEST(Mixup, DrawsSharesOfABetaDistribution) {
  for (const double alpha : {0.2, 0.5, 1.0}) {
    constexpr int64_t kDraws = 20000;
    double sum = 0.0, squares = 0.0;
    for (int64_t sample = 0; sample < kDraws; ++sample) {
      SampleDraws draws(1, 0, sample);
      const double share = mixing_share(alpha, draws);
      ASSERT_TRUE(share >= 0.0 && share <= 1.0);
      sum += share;
      squares += (share - 0.5) * (share - 0.5);
    }
    EXPECT_NEAR(sum / kDraws, 0.5, 0.012);
    EXPECT_NEAR(squares / kDraws, 1.0 / (4.0 * (2.0 * alpha + 1.0)), 0.004);
  }
}

}  // namespace
}  // namespace trireme::data
