#include "trireme/base/error.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace trireme {
namespace {

template <typename Thrown>
int exit_code_of() {
  try {
    throw Thrown("value {}", 1);
  } catch (const Error& error) {
    return static_cast<int>(error.exit_code());
  }
}

TEST(Error, EachTypeHasItsDocumentedExitCode) {
  EXPECT_EQ(exit_code_of<LogicError>(), 1);
  EXPECT_EQ(exit_code_of<ConfigError>(), 2);
  EXPECT_EQ(exit_code_of<EnvironmentError>(), 3);
  EXPECT_EQ(exit_code_of<OutOfMemory>(), 4);
  EXPECT_EQ(exit_code_of<CommError>(), 5);
  EXPECT_EQ(exit_code_of<NumericsError>(), 6);
  EXPECT_EQ(exit_code_of<DataError>(), 7);
}

TEST(Error, FormatsItsArguments) {
  EXPECT_STREQ(ConfigError("a {} b {}", 1, "two").what(), "a 1 b two");
}

TEST(Error, KeepsBracesInArguments) {
  EXPECT_STREQ(ConfigError("{}", "{}{0}").what(), "{}{0}");
}

TEST(Check, HoldsSilentlyAndEvaluatesOnce) {
  int evaluated = 0;
  TRIREME_CHECK(++evaluated == 1, "[test] {}", evaluated);
  EXPECT_EQ(evaluated, 1);
}

TEST(Check, BrokenInvariantNamesMessageConditionAndPlace) {
  const int ranks = 3;
  try {
    TRIREME_CHECK(ranks == 4, "[test.check] ranks={}", ranks);
    FAIL() << "did not throw";
  } catch (const LogicError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.rfind("[test.check] ranks=3", 0), 0u) << message;
    EXPECT_NE(message.find("ranks == 4"), std::string::npos) << message;
    EXPECT_NE(message.find("error_test.cpp"), std::string::npos) << message;
  }
}

TEST(ErrnoText, IsTheTextOfTheSystem) {
  EXPECT_EQ(errno_text(ENOSPC), "No space left on device");
}

}  // namespace
}  // namespace trireme
