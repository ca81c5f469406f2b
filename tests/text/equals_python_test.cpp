// The law of the room: ids and decoded texts are those of Python's `tokenizers`, for tokenizers of every
// component.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/data/scratch.h"
#include "tests/text/expected.h"

namespace trireme::text::testing {
namespace {

class EqualsPython : public ::testing::TestWithParam<std::string> {};

TEST_P(EqualsPython, OnMixedTexts) {
  compare_texts(fixtures(), GetParam());
}

TEST_P(EqualsPython, OnEveryCodePointAlone) {
  compare_code_points(fixtures(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Fixtures, EqualsPython, ::testing::ValuesIn(tokenizers_in(fixtures())),
                         [](const auto& tested) { return tested.param; });

/// The Python that has the module, from the environment of whoever runs the tests.
std::string python_with_tokenizers() {
  const char* python = std::getenv("TRIREME_TEST_PYTHON");
  return python == nullptr ? "python3" : python;
}

TEST(EqualsPythonHere, OnNewRandomTexts) {
  const std::string python = python_with_tokenizers();
  if (std::system((python + " -c 'import tokenizers, sentencepiece' 2> /dev/null").c_str()) != 0)
    GTEST_SKIP() << python
                 << " has no modules tokenizers and sentencepiece; set TRIREME_TEST_PYTHON to one that has";
  const trireme::testing::Scratch scratch;
  const bool is_long = std::getenv("TRIREME_LONG_TESTS") != nullptr;
  const std::string size = is_long ? " --texts 20000 --length 60" : " --texts 500";
  const std::string make =
      fixtures() + "/../make_fixtures.py --no-code-points --seed 2 --output " + scratch.path("");
  ASSERT_EQ(std::system((python + " " + make + size).c_str()), 0);
  for (const std::string& name : tokenizers_in(scratch.path(""))) {
    SCOPED_TRACE(name);
    compare_texts(scratch.path(""), name);
  }
}

}  // namespace
}  // namespace trireme::text::testing
