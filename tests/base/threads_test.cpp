#include "trireme/base/threads.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <system_error>

#include "trireme/base/error.h"

namespace trireme {
namespace {

/// A system that has so many threads.
struct System {
  int64_t threads, started = 0;
  void start_one() {
    if (started == threads)
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    ++started;
  }
};

TEST(StartThreads, StartsAllOfThem) {
  System system{.threads = 9};
  start_threads(4, 4, [&] { system.start_one(); });
  EXPECT_EQ(system.started, 4);
}

TEST(StartThreads, GoesOnWithFewerAndSaysSo) {
  System system{.threads = 2};
  ::testing::internal::CaptureStderr();
  start_threads(5, 1, [&] { system.start_one(); });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(system.started, 2);
  EXPECT_NE(
      log.find("2 of 5 threads could be started, and the work goes on with these: Resource temporarily"),
      std::string::npos)
      << log;
}

TEST(StartThreads, RefusesTooFewWithTheWayOut) {
  System system{.threads = 0};
  try {
    start_threads(5, 1, [&] { system.start_one(); });
    FAIL() << "nothing was thrown";
  } catch (const EnvironmentError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("0 of 5 threads could be started: Resource temporarily"), std::string::npos);
    EXPECT_NE(message.find("ulimit -u"), std::string::npos) << message;
  }
}

TEST(StartThreads, PassesOtherErrorsOn) {
  EXPECT_THROW(start_threads(2, 0, [] { throw std::runtime_error("another"); }), std::runtime_error);
}

}  // namespace
}  // namespace trireme
