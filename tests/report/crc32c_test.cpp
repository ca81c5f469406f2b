#include "trireme/report/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace trireme::report {
namespace {

std::string ascending_bytes() {
  std::string bytes;
  for (char byte = 0; byte < 32; ++byte) bytes += byte;
  return bytes;
}

// The vectors of RFC 3720 appendix B.4, whose checksums are printed there with the least significant byte
// first.
TEST(Crc32c, MatchesTheVectorsOfRfc3720) {
  std::string descending = ascending_bytes();
  std::ranges::reverse(descending);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(ascending_bytes()), 0x46dd794eu);
  EXPECT_EQ(crc32c(descending), 0x113fdb5cu);
}

TEST(Crc32c, MatchesTheCheckValueOfTheCatalogue) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);  // CRC-32/ISCSI in the catalogue of parametrised CRCs
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(Crc32c, SeesEverySingleBitFlip) {
  const std::string bytes = ascending_bytes();
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_NE(crc32c(flipped), crc32c(bytes)) << "bit " << bit;
  }
}

// The inverse as TensorFlow's Unmask() states it.
TEST(Crc32c, MaskCanBeUndone) {
  for (const std::string text : {"", "a", "123456789", "brain.Event:2"}) {
    const uint32_t rotated = masked_crc32c(text) - 0xa282ead8u;
    EXPECT_EQ((rotated >> 17) | (rotated << 15), crc32c(text)) << text;
  }
}

}  // namespace
}  // namespace trireme::report
