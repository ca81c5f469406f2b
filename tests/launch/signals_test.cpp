// What signals do while a SignalTrap lives, and after it.
#include "trireme/launch/signals.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>

namespace trireme::launch {
namespace {

/// The launcher hears of a closed pipe from write(): nothing is left to end the program that called it.
TEST(SignalTrap, ABrokenPipeOfItsTimeEndsNobodyAfterIt) {
  const auto body = [] {
    std::signal(SIGPIPE, SIG_DFL);
    {
      const SignalTrap trap;
      ::raise(SIGPIPE);
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(body(), ::testing::ExitedWithCode(0), "");
}

TEST(SignalTrap, GivesThoseThatAskForAnEndAndLeavesOthersAlone) {
  const auto body = [] {
    std::signal(SIGUSR2, [](int) {});
    SignalTrap trap;
    ::raise(SIGUSR2);
    if (trap.next()) std::_Exit(1);
    for (const int number : {SIGINT, SIGTERM, SIGUSR1}) {
      ::raise(SIGPIPE);
      ::raise(number);
      if (trap.next() != number || trap.next()) std::_Exit(2);
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(body(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace trireme::launch
