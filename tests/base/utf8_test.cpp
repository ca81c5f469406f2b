#include "trireme/base/utf8.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace trireme {
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

TEST(CharacterBegin, NeverLiesInsideACharacter) {
  const std::string text = "a\u00e9\u20ac\U0001f6a3z";  // of 1, 2, 3, 4 and 1 bytes
  const size_t expected[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11};
  for (size_t i = 0; i <= text.size(); ++i) EXPECT_EQ(character_begin(text, i), expected[i]) << i;
}

TEST(CharacterBegin, IsThePlaceItselfWhereThereIsNoCharacter) {
  const std::string text = "ab\x80\x80\x80\x80\x80";
  for (size_t i = 0; i <= text.size(); ++i) EXPECT_EQ(character_begin(text, i), i);
}

TEST(Printable, KeepsTextLineBreaksAndTabs) {
  const std::string text = "int main() {\n\treturn '\u00e9\u20ac\U0001f6a3';\n}";
  EXPECT_EQ(printable(text), text);
}

TEST(Printable, InALineThereAreNoLineBreaks) {
  EXPECT_EQ(printable_line("a\nb\tc\x1b[0m\u00e9"), "a?b?c?[0m\u00e9");
}

TEST(Printable, LeavesNothingThatATerminalWouldObey) {
  EXPECT_EQ(printable("a\x1b[2Jb\x07\r\x7f\x00z"s),
            "a?[2Jb???"
            "?z");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m\xc2\x80\xc2\xa0"),
            "?31m?\xc2\xa0")
      << "C1 as UTF-8, and U+00A0";
  EXPECT_EQ(printable("\x9b"
                      "31m\xff\xe2\x82"),
            "\ufffd"
            "31m\ufffd\ufffd\ufffd")
      << "bytes that are no UTF-8";
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  const std::string shown = printable(all);
  EXPECT_TRUE(is_utf8(shown));
  for (const char byte : shown) {
    const auto code = static_cast<unsigned char>(byte);
    EXPECT_TRUE(byte == '\n' || byte == '\t' || (code >= 0x20 && code != 0x7f)) << int{code};
  }
}

}  // namespace
}  // namespace trireme
