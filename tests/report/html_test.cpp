#include "trireme/report/html.h"

#include <gtest/gtest.h>

#include "tests/report/html_check.h"
#include "trireme/report/page_parts.h"

namespace trireme::report {
namespace {

TEST(Html, TextIsNeverMarkup) {
  EXPECT_EQ(Markup("a <b> & \"c\" 'd'").html(), "a &lt;b&gt; &amp; &quot;c&quot; &#39;d&#39;");
  EXPECT_EQ(element("p", {{"title", "\"><script>"}}, "</p><script>alert(1)</script>").html(),
            "<p title=\"&quot;&gt;&lt;script&gt;\">&lt;/p&gt;&lt;script&gt;alert(1)&lt;/script&gt;</p>\n");
  EXPECT_EQ(Markup(std::string("\x1b[31m\xff\0x", 8)).html(), "?[31m\xef\xbf\xbd?x")
      << "neither HTML nor XML may hold these";
}

TEST(Html, MarkupIsKept) {
  EXPECT_EQ((element("b", "x") + " & y").html(), "<b>x</b> &amp; y");
  EXPECT_EQ(element("td", Markup()).html(), "<td></td>\n") << "HTML takes <td/> for a tag without an end";
  EXPECT_EQ(element("path", {{"d", "M0 0"}}).html(), "<path d=\"M0 0\"/>\n");
}

TEST(Html, Base64IsThatOfItsStandard) {
  // RFC 4648, section 10.
  const std::pair<const char*, const char*> vectors[] = {{"", ""},
                                                         {"f", "Zg=="},
                                                         {"fo", "Zm8="},
                                                         {"foo", "Zm9v"},
                                                         {"foob", "Zm9vYg=="},
                                                         {"fooba", "Zm9vYmE="},
                                                         {"foobar", "Zm9vYmFy"}};
  for (const auto& [bytes, text] : vectors) EXPECT_EQ(base64(bytes), text);
  EXPECT_EQ(base64("\xff\xfe\xfd"), "//79");
}

TEST(Html, ThePageForbidsWhatItDoesNotHave) {
  const std::string page = whole_page("a < b", element("p", "text"));
  HtmlCheck check(page);
  EXPECT_EQ(check.problem(), "");
  EXPECT_NE(page.find("default-src &#39;none&#39;"), std::string::npos);
  EXPECT_NE(page.find("<title>a &lt; b</title>"), std::string::npos);
}

TEST(PlainSvg, IsShapesAndTextAlone) {
  EXPECT_TRUE(is_plain_svg(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 9 9\"><g><title>F0: 1 to 2</title>"
      "<rect x=\"1\" y=\"1\" width=\"2\" height=\"2\" fill=\"#56b4e9\"/></g></svg>\n"));
  for (const char* dangerous :
       {"<svg><script>alert(1)</script></svg>", "<svg onload=\"alert(1)\"></svg>",
        "<svg><image href=\"http://example.com/x.png\"/></svg>", "<svg><foreignObject></foreignObject></svg>",
        "<svg><style>rect{}</style></svg>", "<svg><rect style=\"fill:red\"/></svg>",
        "<svg><rect fill=\"url(http://example.com/x)\"/></svg>", "<svg><rect fill=\"u\\72l(x)\"/></svg>",
        "<svg></svg><script>alert(1)</script>", "<svg><g></svg>", "<svg><rect", "<svg>",
        "<!-- --><svg></svg>", "<svg><a></a></svg>", "<svg></svg>text", ""}) {
    EXPECT_FALSE(is_plain_svg(dangerous)) << dangerous;
  }
}

TEST(PlainSvg, IsPartOfThePageAndAnyOtherAnImage) {
  const std::string plain = "<svg><text>F0</text></svg>", scripted = "<svg><script>alert(1)</script></svg>";
  EXPECT_NE(draw_picture({.name = "a.svg", .svg = true, .content = plain}).html().find(plain),
            std::string::npos);
  const std::string shown = draw_picture({.name = "a.svg", .svg = true, .content = scripted}).html();
  EXPECT_EQ(shown.find("<script"), std::string::npos);
  EXPECT_NE(shown.find("src=\"data:image/svg+xml;base64," + base64(scripted) + "\""), std::string::npos)
      << shown;
}

}  // namespace
}  // namespace trireme::report
