#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/text/expected.h"
#include "tests/text/fuzz.h"

namespace trireme::text::testing {
namespace {

/// Minutes of a core.
class TextLong : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("TRIREME_LONG_TESTS") == nullptr)
      GTEST_SKIP() << "ten million executions take minutes; set TRIREME_LONG_TESTS=1 to run them";
  }
};

TEST_F(TextLong, DamagedFiles) {
  fuzz_files(100'000);
}

TEST_F(TextLong, DamagedTexts) {
  fuzz_texts(10'000'000 / tokenizers_in(fixtures()).size());
}

TEST_F(TextLong, EqualsPythonOnMegabytesOfText) {
  compare_with_python_here("--texts 20000 --length 60 --seed 3");
}

}  // namespace
}  // namespace trireme::text::testing
