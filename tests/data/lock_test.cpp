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

TEST(FileLock, IsWaitedForAsLongAsTheHolderShowsLife) {
  const testing::Scratch scratch;
  std::optional<FileLock> held(std::in_place, scratch.path("lock"), 0.0);
  std::jthread holder([&] {
    for (int i = 0; i < 4; ++i) {
      held->show_life();
      std::this_thread::sleep_for(std::chrono::milliseconds(550));
    }
    held.reset();
  });
  int alive = 0;
  const FileLock second(scratch.path("lock"), 1.0, [&](bool sign) { alive += sign; });
  EXPECT_GE(alive, 2) << "more than two seconds, with a limit of one";
}

TEST(FileLock, IsNotWaitedForByTryTake) {
  const testing::Scratch scratch;
  {
    const FileLock held(scratch.path("lock"), 0.0);
    EXPECT_FALSE(FileLock::try_take(scratch.path("lock")).has_value());
  }
  const auto taken = FileLock::try_take(scratch.path("lock"));
  EXPECT_TRUE(taken.has_value());
  EXPECT_FALSE(FileLock::try_take(scratch.path("lock")).has_value());
}

TEST(FileLock, NamesAPathThatCannotBeCreated) {
  const std::string message =
      testing::message_of<EnvironmentError>([] { const FileLock lock("/nonexistent-folder/lock", 0.0); });
  EXPECT_NE(message.find("/nonexistent-folder/lock"), std::string::npos) << message;
}

}  // namespace
}  // namespace trireme::data
