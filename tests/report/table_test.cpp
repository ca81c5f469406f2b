#include "trireme/report/table.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

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

TEST(Table, RefusesARowOfAnotherWidth) {
  Table table({{"a"}, {"b"}});
  EXPECT_THROW(table.add_row({"only one"}), LogicError);
}

}  // namespace
}  // namespace trireme::report
