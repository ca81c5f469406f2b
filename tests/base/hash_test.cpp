#include "trireme/base/hash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <set>
#include <vector>

namespace trireme {
namespace {

/// The test buffer of xxHash's own sanity check (tests/sanity_test.c): the top bytes of a multiplicative
/// sequence.
std::vector<uint8_t> sanity_buffer(size_t size) {
  std::vector<uint8_t> buffer(size);
  uint64_t generator = 2654435761ULL;
  for (uint8_t& byte : buffer) {
    byte = static_cast<uint8_t>(generator >> 56);
    generator *= 11400714785074694797ULL;
  }
  return buffer;
}

TEST(Xxh3, MatchesThePublishedVectors) {
  const std::pair<size_t, uint64_t> vectors[] = {
      {0, 0x2D06800538D394C2ULL},  {1, 0xC44BDFF4074EECDBULL},   {6, 0x27B56A84CD2D7325ULL},
      {12, 0xA713DAF0DFBB77E7ULL}, {24, 0xA3FE70BF9D3510EBULL},  {48, 0x397DA259ECBA1F11ULL},
      {80, 0xBCDEFBBB2C47C90AULL}, {195, 0xCD94217EE362EC3AULL},
  };
  const std::vector<uint8_t> buffer = sanity_buffer(256);
  for (const auto& [size, expected] : vectors)
    EXPECT_EQ(xxh3(buffer.data(), size), expected) << "size " << size;
}

TEST(Xxh3, SeedChangesTheValue) {
  EXPECT_NE(xxh3("abc", 0), xxh3("abc", 1));
}

TEST(StreamingHash, EqualsOneShotForAnySplit) {
  const std::vector<uint8_t> buffer = sanity_buffer(3000);
  const uint64_t expected = xxh3(buffer.data(), buffer.size());
  for (const size_t piece : {1, 7, 64, 255, 256, 257, 1024, 2999, 3000}) {
    StreamingHash hash;
    for (size_t at = 0; at < buffer.size(); at += piece) {
      hash.update(buffer.data() + at, std::min(piece, buffer.size() - at));
    }
    EXPECT_EQ(hash.digest(), expected) << "pieces of " << piece;
  }
}

TEST(StreamingHash, OfNothingIsTheHashOfTheEmptyText) {
  EXPECT_EQ(StreamingHash().digest(), xxh3(""));
}

TEST(Hex64, HasSixteenLowerCaseDigits) {
  EXPECT_EQ(hex64(0), "0000000000000000");
  EXPECT_EQ(hex64(0xABCDEF), "0000000000abcdef");
  EXPECT_EQ(hex64(UINT64_MAX), "ffffffffffffffff");
}

TEST(Mix64, IsSplitMix64) {
  // The first five outputs for seed 1234567, as in Vigna's reference implementation.
  const uint64_t expected[] = {6457827717110365317ULL, 3203168211198807973ULL, 9817491932198370423ULL,
                               4593380528125082431ULL, 16408922859458223821ULL};
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(mix64(1234567, i), expected[i]);
}

TEST(Mix64, IsInjectiveInTheCounter) {
  std::set<uint64_t> values;
  for (uint64_t i = 0; i < 10000; ++i) values.insert(mix64(99, i));
  EXPECT_EQ(values.size(), 10000u);
}

TEST(Mix64, FlipsHalfOfTheBitsWhenTheCounterMoves) {
  int flipped = 0;
  for (uint64_t i = 0; i < 1000; ++i) flipped += std::popcount(mix64(5, i) ^ mix64(5, i + 1));
  EXPECT_NEAR(flipped / 1000.0, 32.0,
              1.0);  // the mean of 1000 has a standard deviation of 4 / sqrt(1000) = 0.13
}

}  // namespace
}  // namespace trireme
