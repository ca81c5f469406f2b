#include "trireme/launch/exits.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <string_view>
#include <tuple>

#include "trireme/base/error.h"

namespace trireme::launch {

std::string signal_name(int number) {
  const char* name = ::sigabbrev_np(number);
  return name == nullptr ? "unnamed" : fmt::format("SIG{}", name);
}

namespace {

auto order_of_blame(const RankExit& exit) {
  return std::tuple(exit.asked, exit.end.signal == 0, lost_a_peer(exit), exit.at);
}

}  // namespace

std::string_view meaning(int code) {
  switch (static_cast<ExitCode>(code)) {
    case ExitCode::kUsage:
      return " (bad command line or config)";
    case ExitCode::kEnvironment:
      return " (machine or installation unusable)";
    case ExitCode::kOutOfMemory:
      return " (out of memory)";
    case ExitCode::kCommunication:
      return " (lost a peer or timed out)";
    case ExitCode::kNumerics:
      return " (NaN or infinity)";
    case ExitCode::kCorruptData:
      return " (damaged data)";
    case ExitCode::kComparison:
      return " (comparison failed)";
    case ExitCode::kPreempted:
      return " (preempted)";
    case ExitCode::kInterrupted:
      return " (interrupted)";
    default:
      return code == 128 + SIGTERM ? " (terminated)" : "";
  }
}

bool explains_itself(const RankExit& exit) {
  const int code = exit_code(exit);
  return exit.end.signal == 0 && code >= static_cast<int>(ExitCode::kUsage) &&
         code <= static_cast<int>(ExitCode::kCorruptData) &&
         code != static_cast<int>(ExitCode::kCommunication);
}

std::string_view state_in_words(char letter) {
  switch (letter) {
    case 'T':
    case 't':
      return "it had been stopped by a signal";
    case 'D':
      return "it was blocked in a kernel call";
    case 'R':
      return "it was computing";
    case 'S':
      return "it was waiting for something";
    default:
      return "its state is unknown";
  }
}

bool lost_a_peer(const RankExit& exit) {
  return exit.hung_s == 0.0 && exit_code(exit) == static_cast<int>(ExitCode::kCommunication);
}

int exit_code(const RankExit& exit) {
  if (exit.hung_s > 0.0) return static_cast<int>(ExitCode::kCommunication);
  if (exit.starved) return static_cast<int>(ExitCode::kOutOfMemory);
  return exit.end.signal != 0 ? 128 + exit.end.signal : exit.end.code;
}

bool stopped_in_order(const RankExit& exit) {
  const int code = exit_code(exit);
  return code == static_cast<int>(ExitCode::kPreempted) || is_stop_code(code);
}

const RankExit& culprit(std::span<const RankExit> failures) {
  TRIREME_CHECK(!failures.empty(), "[launch.culprit] there are no failures to find the culprit of");
  return *std::ranges::min_element(failures, {}, order_of_blame);
}

std::string describe(const RankExit& exit, bool ours) {
  const std::string who = fmt::format("rank {} (pid {})", exit.rank, exit.pid);
  if (exit.hung_s > 0.0) {
    return fmt::format("{} gave no sign of life for {:.0f} s and was killed ({})", who, exit.hung_s,
                       state_in_words(exit.stuck));
  }
  if (exit.starved) return who + " was killed by the kernel because memory ran out";
  if (exit.end.signal == 0)
    return fmt::format("{} exited with code {}{}", who, exit.end.code, ours ? meaning(exit.end.code) : "");
  return fmt::format("{} was killed by signal {} ({})", who, exit.end.signal, signal_name(exit.end.signal));
}

std::string hint(const RankExit& exit) {
  if (exit.hung_s > 0.0) return "; if it was only slow, raise comm.timeout_s";
  if (exit.starved) return "";
  if (exit.end.signal == SIGKILL)
    return "; unless someone sent this signal, the kernel's OOM killer did (see dmesg): reduce memory use";
  if (exit.end.signal == SIGBUS)
    return "; the usual causes are a full /dev/shm or a memory-mapped file that was truncated";
  return "";
}

}  // namespace trireme::launch
