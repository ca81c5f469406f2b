#include "trireme/data/utf8.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace trireme::data {
namespace {

using namespace std::string_literals;

/// The encoding form of RFC 3629 with `length` bytes, whether or not it is the shortest.
std::string encode(uint32_t code, int length) {
  if (length == 1) return {static_cast<char>(code)};
  const uint32_t leads[] = {0, 0, 0xc0, 0xe0, 0xf0};
  std::string text;
  for (int i = length - 1; i > 0; --i) {
    text.insert(text.begin(), static_cast<char>(0x80 | (code & 0x3f)));
    code >>= 6;
  }
  text.insert(text.begin(), static_cast<char>(leads[length] | code));
  return text;
}

int shortest(uint32_t code) {
  return code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
}

TEST(IsUtf8, AcceptsExactlyTheCodePointsThatAreNoSurrogates) {
  for (uint32_t code = 0; code < 0x110000; code += code < 0x11000 ? 1 : 61) {
    const bool surrogate = code >= 0xd800 && code <= 0xdfff;
    ASSERT_EQ(is_utf8(encode(code, shortest(code))), !surrogate) << std::hex << code;
  }
  EXPECT_TRUE(is_utf8(encode(0x10ffff, 4)));
  EXPECT_FALSE(is_utf8(encode(0x110000, 4)));
}

TEST(IsUtf8, RefusesOverlongForms) {
  for (uint32_t code = 0; code < 0x10000; code += 7) {
    for (int length = shortest(code) + 1; length <= 4; ++length) {
      ASSERT_FALSE(is_utf8(encode(code, length))) << std::hex << code << " in " << length;
    }
  }
}

TEST(IsUtf8, RefusesTruncatedAndStrayBytesAtEveryAlignment) {
  for (size_t before = 0; before < 20; ++before) {
    const std::string ascii(before, 'a');
    for (const uint32_t code : {0xe9u, 0x20acu, 0x1f600u}) {
      const std::string whole = encode(code, shortest(code));
      EXPECT_TRUE(is_utf8(ascii + whole + ascii));
      for (size_t keep = 1; keep < whole.size(); ++keep) {
        EXPECT_FALSE(is_utf8(ascii + whole.substr(0, keep)));
        EXPECT_FALSE(is_utf8(ascii + whole.substr(0, keep) + "a"));
        EXPECT_FALSE(is_utf8(ascii + whole.substr(keep)));
      }
    }
  }
}

TEST(IsUtf8, AcceptsNothingAndZeroBytes) {
  EXPECT_TRUE(is_utf8(""));
  EXPECT_TRUE(is_utf8("a\0b"s));
}

}  // namespace
}  // namespace trireme::data
