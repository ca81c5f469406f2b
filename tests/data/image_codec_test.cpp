#include "trireme/data/images/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "tests/data/image_files.h"
#include "trireme/base/hash.h"

namespace trireme::data {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

/// Slow changes, which JPEG keeps.
Image smooth(int64_t channels, int64_t height, int64_t width) {
  Image image{.shape = {channels, height, width}, .pixels = {}};
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      for (int64_t channel = 0; channel < channels; ++channel)
        image.pixels.push_back(static_cast<uint8_t>(40 + 60 * channel + 50 * y / height + 40 * x / width));
    }
  }
  return image;
}

int largest_difference(const Image& a, const Image& b) {
  int largest = 0;
  for (size_t i = 0; i < a.pixels.size(); ++i)
    largest = std::max(largest, std::abs(a.pixels[i] - b.pixels[i]));
  return largest;
}

TEST(Png, KeepsEveryPixel) {
  for (const int64_t channels : {1, 3}) {
    const Image image = testing::pattern_image(3, {channels, 17, 9});
    const Image back = decode_image(bytes_of(encode_png(image)), {.channels = channels});
    EXPECT_EQ(back.shape, image.shape);
    EXPECT_EQ(back.pixels, image.pixels);
  }
}

TEST(Png, TurnsColoursIntoLumaAndGreyIntoColours) {
  const Image colours{.shape = {3, 1, 3}, .pixels = {255, 0, 0, 0, 255, 0, 0, 0, 255}};
  const Image grey = decode_image(bytes_of(encode_png(colours)), {.channels = 1});
  EXPECT_EQ(grey.pixels, (std::vector<uint8_t>{76, 150, 29}));  // ITU-R BT.601: 0.299, 0.587, 0.114
  const Image one{.shape = {1, 1, 2}, .pixels = {7, 200}};
  const Image three = decode_image(bytes_of(encode_png(one)), {.channels = 3});
  EXPECT_EQ(three.pixels, (std::vector<uint8_t>{7, 7, 7, 200, 200, 200}));
}

TEST(Png, Of16BitsHasTheBrightnessOf8) {
  // One pixel of 16 bits a channel, 0x8080 each, without a word about gamma.
  constexpr std::string_view kHex =
      "89504e470d0a1a0a0000000d4948445200000001000000011002000000c0e78f9d0000000b49444154789c63"
      "680003000a870301c4c61f660000000049454e44ae426082";
  std::string file;
  for (size_t at = 0; at < kHex.size(); at += 2)
    file.push_back(static_cast<char>(std::stoi(std::string(kHex.substr(at, 2)), nullptr, 16)));
  EXPECT_EQ(decode_image(bytes_of(file), {.channels = 3}).pixels, (std::vector<uint8_t>{0x80, 0x80, 0x80}));
}

TEST(Jpeg, APartIsThatOfTheWholePicture) {
  for (const auto& [channels, chroma] : {std::pair<int64_t, int>{1, 1}, {3, 1}, {3, 2}}) {
    const std::string file = encode_jpeg(testing::pattern_image(5, {channels, 150, 203}), 80, chroma);
    for (const int64_t least_side : {0, 75, 37, 18}) {
      const Image whole = decode_image(bytes_of(file), {.channels = channels, .least_side = least_side});
      SampleDraws draws(7, 0, least_side + chroma);
      for (int turn = 0; turn < 200; ++turn) {
        ImagePart part;
        part.height = 1 + draws.below(whole.shape.height);
        part.width = 1 + draws.below(whole.shape.width);
        part.top = draws.below(whole.shape.height - part.height + 1);
        part.left = draws.below(whole.shape.width - part.width + 1);
        ImageShape seen;
        const auto choose = [&](const ImageShape& shape) {
          seen = shape;
          return part;
        };
        const Image found =
            decode_image(bytes_of(file), {.channels = channels, .least_side = least_side, .part = choose});
        EXPECT_EQ(seen, whole.shape);
        const Image expected = cut(whole, part);
        ASSERT_EQ(found.shape, expected.shape);
        ASSERT_EQ(largest_difference(found, expected), 0)
            << part.height << " x " << part.width << " at " << part.top << ", " << part.left << " of "
            << whole.shape.to_string() << ", chroma " << chroma;
      }
    }
  }
}

TEST(Jpeg, AFileThatIsCutOffIsBrokenWhateverPartIsWanted) {
  const std::string file = encode_jpeg(testing::pattern_image(5, {3, 150, 203}), 80);
  const auto top = [](const ImageShape&) { return ImagePart{.top = 0, .left = 0, .height = 8, .width = 8}; };
  EXPECT_NO_THROW(decode_image(bytes_of(file), {.part = top}));
  EXPECT_THROW(decode_image(bytes_of(file.substr(0, file.size() - 200)), {.part = top}), BrokenImage);
  EXPECT_EQ(decode_image(bytes_of(file + "behind the end"), {.part = top}).shape.height, 8);
}

TEST(Png, APartIsThatOfTheWholePicture) {
  const Image image = testing::pattern_image(3, {3, 17, 9});
  const ImagePart part{.top = 3, .left = 2, .height = 10, .width = 4};
  const Image found =
      decode_image(bytes_of(encode_png(image)), {.part = [&](const ImageShape&) { return part; }});
  EXPECT_EQ(found.shape, (ImageShape{.channels = 3, .height = 10, .width = 4}));
  EXPECT_EQ(found.pixels, cut(image, part).pixels);
}

TEST(Jpeg, KeepsASmoothPicture) {
  for (const int64_t channels : {1, 3}) {
    const Image image = smooth(channels, 37, 51);
    const Image back = decode_image(bytes_of(encode_jpeg(image, 95)), {.channels = channels});
    EXPECT_EQ(back.shape, image.shape);
    EXPECT_LE(largest_difference(image, back), 4);
  }
}

TEST(Jpeg, ComesSmallerOnlyWhereBothSidesStayLongEnough) {
  const std::string jpeg = encode_jpeg(smooth(3, 96, 200), 95);
  const auto shape_for = [&](int64_t least) {
    return decode_image(bytes_of(jpeg), {.channels = 3, .least_side = least}).shape;
  };
  EXPECT_EQ(shape_for(0), (ImageShape{3, 96, 200}));
  EXPECT_EQ(shape_for(49), (ImageShape{3, 96, 200}));
  EXPECT_EQ(shape_for(48), (ImageShape{3, 48, 100}));
  EXPECT_EQ(shape_for(24), (ImageShape{3, 24, 50}));
  EXPECT_EQ(shape_for(1), (ImageShape{3, 12, 25}));
  const Image half = decode_image(bytes_of(jpeg), {.channels = 3, .least_side = 48});
  EXPECT_LE(largest_difference(half, smooth(3, 48, 100)), 5);
}

TEST(Codec, RefusesWhatLacksPixels) {
  const Image image = testing::pattern_image(1, {3, 24, 24});
  for (const std::string& whole : {encode_jpeg(image, 90), encode_png(image)}) {
    constexpr size_t kEnd = 24;  // marks and checksums behind the last pixel
    for (size_t size = 0; size + kEnd < whole.size(); size += 7)
      EXPECT_THROW(decode_image(bytes_of(whole.substr(0, size))), BrokenImage)
          << size << " of " << whole.size();
  }
}

TEST(Codec, RefusesAHeaderOfTooManyPixels) {
  std::string jpeg = encode_jpeg(smooth(3, 16, 16), 90);
  const size_t frame = jpeg.find("\xff\xc0");
  ASSERT_NE(frame, std::string::npos);
  for (size_t at = frame + 5; at < frame + 9; ++at) jpeg[at] = '\xff';  // 65535 x 65535
  EXPECT_THROW(decode_image(bytes_of(jpeg)), BrokenImage);
  std::string png = encode_png(smooth(3, 16, 16));
  png[16] = png[20] = '\x7f';
  EXPECT_THROW(decode_image(bytes_of(png)), BrokenImage);
}

TEST(Codec, EndsWithAPictureOrARefusalWhateverTheBytes) {
  const Image image = testing::pattern_image(2, {3, 20, 20});
  for (const std::string& whole : {encode_jpeg(image, 90), encode_png(image)}) {
    int64_t refused = 0;
    for (uint64_t round = 0; round < 1500; ++round) {
      std::string damaged = whole;
      for (uint64_t i = 0; i <= round % 4; ++i) {
        const uint64_t bits = mix64(round, i);
        damaged[2 + bits % (damaged.size() - 2)] ^= static_cast<char>(1 + (bits >> 40) % 255);
      }
      try {
        const Image found = decode_image(bytes_of(damaged));
        EXPECT_EQ(static_cast<int64_t>(found.pixels.size()),
                  found.shape.channels * found.shape.height * found.shape.width);
      } catch (const BrokenImage&) {
        ++refused;
      }
    }
    EXPECT_GT(refused, 0);
  }
}

}  // namespace
}  // namespace trireme::data
