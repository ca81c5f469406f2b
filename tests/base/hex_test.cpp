#include "trireme/base/hex.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

TEST(Hex, HasTwoDigitsForEachByte) {
  const unsigned char bytes[] = {0x00, 0x0f, 0xa5, 0xff, 0x10};
  EXPECT_EQ(to_hex(bytes, sizeof bytes), "000fa5ff10");
  EXPECT_EQ(to_hex(nullptr, 0), "");
}

TEST(Hex, GivesEveryByteBack) {
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  EXPECT_EQ(from_hex(to_hex(bytes.data(), bytes.size())), bytes);
  EXPECT_EQ(from_hex(""), "");
}

TEST(Hex, IsNoOtherText) {
  for (const char* text : {"0", "abc", "0g", "g0", "AB", "0x12", "1 ", " 1", "-1"})
    EXPECT_FALSE(from_hex(text)) << text;
}

}  // namespace
}  // namespace trireme
