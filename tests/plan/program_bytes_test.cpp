#include "trireme/plan/program_bytes.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

std::vector<int64_t> bytes_of_lines(const std::string& lines) {
  return program_bytes(
      program_from_text("trireme.program/1\nsignal a workers=0,1\nsignal b workers=2\n" + lines, "p.txt"), 3,
      "p.txt");
}

TEST(ProgramBytes, AreThoseOfTensorsThatAreThereAtOnce) {
  // Rows of 5 are 3 and 2; what is whole counts on both.
  const std::string split = "t0 = full shape=5,8 value=1 place=S(0) @a\n";
  EXPECT_EQ(bytes_of_lines(split), (std::vector<int64_t>{3 * 8 * 4, 2 * 8 * 4, 0}));
  EXPECT_EQ(bytes_of_lines("t0 = full shape=5,8 value=1 @a\n"), (std::vector<int64_t>{160, 160, 0}));
  EXPECT_EQ(bytes_of_lines(split + "t1 = relu t0 @a\nfree t1\nt2 = neg t0 @a\nfree t0\nfree t2\n"),
            (std::vector<int64_t>{2 * 96, 2 * 64, 0}));
  EXPECT_EQ(bytes_of_lines(split + "t1 = cross t0 @b\nt2 = relu t1 @b\n"),
            (std::vector<int64_t>{96, 64, 2 * 160}));
  EXPECT_EQ(bytes_of_lines("t0 = full shape=0,8 value=1 place=S(0) @a\n"), (std::vector<int64_t>{0, 0, 0}));
}

TEST(ProgramBytes, NameTheInstructionThatCannotBePlaced) {
  try {
    bytes_of_lines("t0 = full shape=5,8 value=1 @a\nt1 = relu t0 @b\n");
    FAIL() << "a tensor of other workers was taken";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("p.txt: instruction 2"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace trireme::plan
