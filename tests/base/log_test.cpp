#include "trireme/base/log.h"

#include <gtest/gtest.h>

#include <regex>

#include "trireme/base/error.h"

namespace trireme {
namespace {

/// Restores the process-wide settings.
class Log : public testing::Test {
 protected:
  void TearDown() override {
    set_log_level(previous_);
    set_log_prefix("");
  }

  template <typename Action>
  static std::string stderr_of(Action action) {
    testing::internal::CaptureStderr();
    action();
    return testing::internal::GetCapturedStderr();
  }

 private:
  LogLevel previous_ = log_level();
};

TEST_F(Log, LineHasTimePrefixLevelAndText) {
  set_log_prefix("[r1] ");
  const std::string line = stderr_of([] { log_warning("disk {}", "slow"); });
  EXPECT_TRUE(std::regex_match(line, std::regex(R"(\d\d:\d\d:\d\d \[r1\] warning: disk slow\n)"))) << line;
}

TEST_F(Log, InformationCarriesNoLevelWord) {
  const std::string line = stderr_of([] { log_info("ready"); });
  EXPECT_TRUE(std::regex_match(line, std::regex(R"(\d\d:\d\d:\d\d ready\n)"))) << line;
}

TEST_F(Log, PrintsExactlyTheLevelsAtOrAboveTheSetting) {
  const LogLevel levels[] = {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError};
  for (const LogLevel setting :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError, LogLevel::kSilent}) {
    set_log_level(setting);
    for (const LogLevel level : levels) {
      EXPECT_EQ(!stderr_of([&] { log_line(level, "x"); }).empty(), level >= setting)
          << static_cast<int>(level) << " at " << static_cast<int>(setting);
    }
  }
}

TEST_F(Log, HelpersObeyTheLevel) {
  set_log_level(LogLevel::kSilent);
  EXPECT_EQ(stderr_of([] {
              log_debug("a");
              log_info("b");
              log_warning("c");
              log_error("d");
            }),
            "");
}

TEST_F(Log, NothingGoesToStdout) {
  testing::internal::CaptureStdout();
  stderr_of([] { log_error("x"); });
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST(LogLevel, ParsesItsNames) {
  EXPECT_EQ(parse_log_level("debug"), LogLevel::kDebug);
  EXPECT_EQ(parse_log_level("info"), LogLevel::kInfo);
  EXPECT_EQ(parse_log_level("warning"), LogLevel::kWarning);
  EXPECT_EQ(parse_log_level("error"), LogLevel::kError);
  EXPECT_EQ(parse_log_level("silent"), LogLevel::kSilent);
}

TEST(LogLevel, RefusesOtherWords) {
  for (const char* word : {"", "Info", "warn", "0"}) EXPECT_THROW(parse_log_level(word), ConfigError) << word;
}

}  // namespace
}  // namespace trireme
