#include "trireme/text/regex.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"
#include "trireme/text/regex_syntax.h"
#include "trireme/text/stand_ins.h"

namespace trireme::text {
namespace {

std::vector<std::string> matches(const std::string& pattern, const std::string& text) {
  std::vector<Span> spans;
  Regex(pattern).find_all(text, spans);
  std::vector<std::string> found;
  for (const Span& span : spans) found.emplace_back(span.of(text));
  return found;
}

using Found = std::vector<std::string>;

// Oniguruma's documentation of its Ruby syntax (doc/RE) says each of these.
TEST(Regex, ReadsOnigurumasSyntax) {
  EXPECT_EQ(matches("^b", "a\nb"), Found{"b"});            // ends of lines, always
  EXPECT_EQ(matches(R"(\h+)", "xyz12ef"), Found{"12ef"});  // a hexadecimal digit
  EXPECT_EQ(matches("a{,2}b", "aab"), Found{"aab"});       // none to two
  EXPECT_EQ(matches(R"(a++a)", "aaa"), Found{});           // possessive
  EXPECT_EQ(matches(R"(\u00e9)", "\xc3\xa9"), Found{"\xc3\xa9"});
  EXPECT_EQ(matches(R"(\w+)", "e\xcc\x81x y"), (Found{"e\xcc\x81x", "y"}));  // a mark is of the word
  EXPECT_EQ(matches(R"(\bx)", "ax x"), Found{"x"});
  EXPECT_EQ(matches(R"([\p{Han}a]+)",
                    "b\xe4\xb8\xad"
                    "a"),
            Found{"\xe4\xb8\xad"
                  "a"});
  EXPECT_EQ(matches(R"((?i:'S))", "it's"), Found{"'s"});
}

TEST(Regex, FindsEmptyMatchesButNotBesideAnother) {
  EXPECT_EQ(matches("a*", "baac"), (Found{"", "aa", ""}));
}

TEST(Regex, RefusesWhatItDoesNotTranslate) {
  for (const char* pattern :
       {"[a&&b]", "[a[bc]]", R"([\W])", "(?m:a)", "(*NO_JIT)a", "a{1,2}+", "(a", R"(\u12)", "[[:punct:]]"}) {
    EXPECT_THROW(Regex{pattern}, ConfigError) << pattern;
  }
}

TEST(Regex, KnowsCharactersThatAreNewerThanPcre2) {
  EXPECT_EQ(matches(R"(\p{L}+)", "a\xf0\xae\xaf\xb0"), Found{"a\xf0\xae\xaf\xb0"});  // U+2EBF0, Unicode 15.1
  EXPECT_EQ(matches(R"(\s)", "\xe1\xa0\x8e"), Found{});  // U+180E, no space since 6.3
}

TEST(StandIns, HaveTheLengthOfWhatTheyStandFor) {
  const std::string text = "a\xe1\xa0\x8e\xf0\xae\xaf\xb0z";
  EXPECT_TRUE(needs_stand_ins(text));
  EXPECT_EQ(with_stand_ins(text).size(), text.size());
  EXPECT_FALSE(needs_stand_ins("plain \xe4\xb8\xad"));
}

}  // namespace
}  // namespace trireme::text
