#include "trireme/report/table.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::report {
namespace {

TEST(Table, AlignsColumnsToTheirWidestCell) {
  Table table({{"name"}, {"count", Align::kRight}, {"note"}});
  table.add_row({"a", "5", "x"});
  table.add_row({"longer", "1,234,567", ""});
  EXPECT_EQ(table.to_string(),
            "name        count  note\n"
            "a               5  x\n"
            "longer  1,234,567\n");
}

TEST(Table, CountsLettersAndNotBytes) {
  Table table({{"a"}, {"b"}});
  table.add_row({"\xc3\xa9\xc3\xa9", "x"});  // two letters in four bytes
  table.add_row({"ee", "x"});
  EXPECT_EQ(table.to_string(), "a   b\n\xc3\xa9\xc3\xa9  x\nee  x\n");
}

size_t longest_line(const std::string& text) {
  size_t longest = 0;
  for (const std::string& line : split(text, '\n')) longest = std::max(longest, line.size());
  return longest;
}

TEST(Table, WrapsTheTextOfItsLastColumn) {
  Table table({{"plan"}, {"run"}});
  table.add_row({"policy", "everything replicated; gradients reduced, then gathered"});
  table.add_row({"ranks", "2"});
  EXPECT_EQ(table.to_string(40),
            "plan    run\n"
            "policy  everything replicated; gradients\n"
            "        reduced, then gathered\n"
            "ranks   2\n");
  EXPECT_EQ(longest_line(table.to_string()), 8u + 55u) << "without a limit all of it stands in its line";
}

TEST(Table, TurnsWhatIsTooWideAndThenStacksIt) {
  Table table(
      {{"policy"}, {"parameters", Align::kRight}, {"gradients", Align::kRight}, {"peak", Align::kRight}});
  table.add_row({"ddp", "10 MiB", "20 MiB", "129 MiB"});
  table.add_row({"zero2", "10 MiB", "5 MiB", "99 MiB"});
  const std::string turned =
      "policy          ddp   zero2\n"
      "parameters   10 MiB  10 MiB\n"
      "gradients    20 MiB   5 MiB\n"
      "peak        129 MiB  99 MiB\n";
  EXPECT_EQ(table.to_string(30), turned);
  const std::string stacked =
      "policy      ddp\n"
      "parameters  10 MiB\n"
      "gradients   20 MiB\n"
      "peak        129 MiB\n"
      "\n"
      "policy      zero2\n";
  EXPECT_TRUE(table.to_string(20).starts_with(stacked)) << table.to_string(20);
  for (int64_t columns = 20; columns < 80; ++columns)
    EXPECT_LE(longest_line(table.to_string(columns)), static_cast<size_t>(columns)) << columns;
  EXPECT_EQ(table.to_string(80), table.to_string()) << "wide enough";
}

TEST(Table, RefusesARowOfAnotherWidth) {
  Table table({{"a"}, {"b"}});
  EXPECT_THROW(table.add_row({"only one"}), LogicError);
}

}  // namespace
}  // namespace trireme::report
