#include "trireme/text/unicode.h"

#include <gtest/gtest.h>

namespace trireme::text {
namespace {

TEST(ReplaceInvalid, PutsOneSignForEachMaximalPart) {
  // Unicode 15, table 3-8.
  EXPECT_EQ(replace_invalid("\x61\xf1\x80\x80\xe1\x80\xc2\x62\x80\x63\x80\xbf\x64"),
            "a\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
            "b\xef\xbf\xbd"
            "c\xef\xbf\xbd\xef\xbf\xbd"
            "d");
}

TEST(AppendUtf8, AndCodePointAtAreInverse) {
  for (uint32_t code = 0; code < 0x110000; code += code < 0x11000 ? 1 : 17) {
    if (code >= 0xd800 && code < 0xe000) continue;
    std::string text;
    append_utf8(text, code);
    const CodePoint point = code_point_at(text, 0);
    ASSERT_EQ(point.value, code);
    ASSERT_EQ(point.length, text.size());
  }
}

}  // namespace
}  // namespace trireme::text
