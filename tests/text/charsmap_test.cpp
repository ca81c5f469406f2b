// A table of replacements, whole and damaged: what it points to that is not there replaces nothing.
#include "trireme/text/charsmap.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/support/refusal.h"
#include "trireme/base/error.h"

namespace trireme::text {
namespace {

/// The bytes of a table in which "a" stands for `text`. Its double array has the root at 0, whose offset is
/// 0, the node of 'a' at 97, and its leaf at 96, with `value`.
std::string table_of(const std::string& text, uint32_t value = 0) {
  std::vector<uint32_t> units(98);
  units[97] = uint32_t{1} << 10 | 0x100 | 'a';  // its children are at 97 ^ 1; it has a leaf
  units[96] = 0x80000000 | value;
  const auto bytes = static_cast<uint32_t>(units.size() * sizeof(uint32_t));
  std::string table(sizeof bytes + bytes, '\0');
  std::memcpy(table.data(), &bytes, sizeof bytes);
  std::memcpy(table.data() + sizeof bytes, units.data(), bytes);
  return table + text + '\0';
}

TEST(Charsmap, ReplacesWhatIsInTheTable) {
  const Charsmap map(table_of("bc"), "here");
  ASSERT_TRUE(map.longest("ax").has_value());
  EXPECT_EQ(map.longest("ax")->replacement, "bc");
  EXPECT_EQ(map.longest("ax")->length, 1u);
  EXPECT_FALSE(map.longest("xa").has_value());
  EXPECT_EQ(Charsmap(table_of("abc", 2), "here").longest("a")->replacement, "c");
}

TEST(Charsmap, PointsToTextsThatAreThere) {
  const std::string text = "bc";
  for (const uint32_t value : {3u, 4u, 0x7fffffffu})
    EXPECT_FALSE(Charsmap(table_of(text, value), "here").longest("a").has_value()) << value;
  EXPECT_EQ(Charsmap(table_of(text, 2), "here").longest("a")->replacement, "");
}

TEST(Charsmap, NamesAFileWhoseTrieIsLongerThanItIs) {
  const std::string whole = table_of("bc");
  for (const size_t kept : {size_t{1}, size_t{3}, size_t{4}, size_t{100}, whole.size() - 4})
    test::expect_refusal([&] { Charsmap(whole.substr(0, kept), "model.model"); },
                         {"[text.charsmap] model.model has"});
}

/// Other text at worst: no flipped bit reads outside of the table, which sanitizers would tell.
TEST(Charsmap, SurvivesEveryFlippedBit) {
  const std::string whole = table_of("bc");
  int64_t refused = 0, other = 0;
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string bytes = whole;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
    try {
      const Charsmap map(bytes, "here");
      for (int text = 0; text < 256; ++text) {
        const std::string letters = {static_cast<char>(text), 'a'};
        const auto entry = map.longest(letters);
        EXPECT_TRUE(!entry || (entry->length > 0 && entry->length <= letters.size()));
        other += text == 'a' && (!entry || entry->replacement != "bc");
      }
    } catch (const DataError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(other, 0);
}

}  // namespace
}  // namespace trireme::text
