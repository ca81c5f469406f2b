#include "trireme/base/env.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "trireme/base/error.h"

namespace trireme {
namespace {

using Variables = std::map<std::string, std::string>;

TEST(Environment, EmptyValueCountsAsUnset) {
  const Environment environment(Variables{{"EMPTY", ""}, {"FULL", "x"}});
  EXPECT_EQ(environment.get("EMPTY"), std::nullopt);
  EXPECT_EQ(environment.get_int("EMPTY"), std::nullopt);
  EXPECT_EQ(environment.get("ABSENT"), std::nullopt);
  EXPECT_EQ(environment.get("FULL"), "x");
}

TEST(Environment, ReadsWholeNumbersOfTheWholeRange) {
  const Environment environment(
      Variables{{"ZERO", "0"}, {"MINUS", "-7"}, {"MAX", "9223372036854775807"}, {"PADDED", "0042"}});
  EXPECT_EQ(environment.get_int("ZERO"), 0);
  EXPECT_EQ(environment.get_int("MINUS"), -7);
  EXPECT_EQ(environment.get_int("MAX"), INT64_MAX);
  EXPECT_EQ(environment.get_int("PADDED"), 42);
}

TEST(Environment, RefusesWhatIsNoWholeNumberAndNamesIt) {
  for (const char* text : {"four", "4x", " 4", "4 ", "4.0", "9223372036854775808", "-"}) {
    const Environment environment(Variables{{"RANK", text}});
    try {
      environment.get_int("RANK");
      FAIL() << "accepted '" << text << "'";
    } catch (const ConfigError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("RANK"), std::string::npos) << message;
      EXPECT_NE(message.find(text), std::string::npos) << message;
    }
  }
}

TEST(Environment, SnapshotHoldsTheVariablesOfTheProcess) {
  ASSERT_EQ(::setenv("TRIREME_TEST_SNAPSHOT", "a=b", 1), 0);
  const Environment snapshot = Environment::process();
  ASSERT_EQ(::setenv("TRIREME_TEST_SNAPSHOT", "changed", 1), 0);
  EXPECT_EQ(snapshot.get("TRIREME_TEST_SNAPSHOT"), "a=b");
  ::unsetenv("TRIREME_TEST_SNAPSHOT");
}

TEST(Environment, SetAndUnsetChangeTheValueOnly) {
  Environment environment;
  environment.set("TRIREME_TEST_VALUE", "1");
  EXPECT_EQ(environment.get_int("TRIREME_TEST_VALUE"), 1);
  EXPECT_EQ(std::getenv("TRIREME_TEST_VALUE"), nullptr);
  environment.unset("TRIREME_TEST_VALUE");
  EXPECT_EQ(environment.get("TRIREME_TEST_VALUE"), std::nullopt);
}

TEST(Environment, AProcessDefaultGivesWayToWhatIsSet) {
  const char* const name = "TRIREME_TEST_DEFAULT";
  ::unsetenv(name);
  set_process_default(name, "ours");
  EXPECT_EQ(Environment::process().get(name), "ours");
  set_process_default(name, "later");
  EXPECT_EQ(Environment::process().get(name), "ours");
  ::unsetenv(name);
}

TEST(CacheDir, PrefersXdgOverHome) {
  EXPECT_EQ(cache_dir(Environment(Variables{{"XDG_CACHE_HOME", "/c"}, {"HOME", "/h"}})), "/c/trireme");
  EXPECT_EQ(cache_dir(Environment(Variables{{"HOME", "/h"}})), "/h/.cache/trireme");
}

TEST(CacheDir, NeedsAHome) {
  EXPECT_THROW(cache_dir(Environment()), EnvironmentError);
}

}  // namespace
}  // namespace trireme
