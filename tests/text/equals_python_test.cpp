// The law of the room: ids and decoded texts are those of Python's `tokenizers`, for tokenizers of every
// component.
#include <gtest/gtest.h>

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

TEST(EqualsPythonHere, OnNewRandomTexts) {
  compare_with_python_here("--texts 500 --seed 2");
}

}  // namespace
}  // namespace trireme::text::testing
