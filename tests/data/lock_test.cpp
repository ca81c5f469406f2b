#include "trireme/data/lock.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <optional>
#include <thread>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"

namespace trireme::data {
namespace {

TEST(FileLock, NamesTheHolderWhenTheTimeIsOver) {
  const testing::Scratch scratch;
  const FileLock held(scratch.path("lock"), 0.0);
  const std::string message =
      testing::message_of<EnvironmentError>([&] { const FileLock second(scratch.path("lock"), 0.05); });
  EXPECT_NE(message.find(std::to_string(::getpid())), std::string::npos) << message;
  EXPECT_NE(message.find(scratch.path("lock")), std::string::npos) << message;
}

TEST(FileLock, IsTakenWhenTheHolderLetsGo) {
  const testing::Scratch scratch;
  std::optional<FileLock> held(std::in_place, scratch.path("lock"), 0.0);
  std::jthread waiter([&] { const FileLock second(scratch.path("lock"), 30.0); });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  held.reset();
  waiter.join();
  EXPECT_NO_THROW(FileLock(scratch.path("lock"), 0.0));
}

TEST(FileLock, NamesAPathThatCannotBeCreated) {
  const std::string message =
      testing::message_of<EnvironmentError>([] { const FileLock lock("/nonexistent-folder/lock", 0.0); });
  EXPECT_NE(message.find("/nonexistent-folder/lock"), std::string::npos) << message;
}

}  // namespace
}  // namespace trireme::data
