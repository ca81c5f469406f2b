#pragma once
// The meaning of a rank's end: its exit code, the sentence about it, and which of several failures came
// first. Pure.
#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "trireme/launch/child.h"

namespace trireme::launch {

struct RankExit {
  int64_t rank = 0;
  pid_t pid = 0;
  ProcessEnd end;
  bool asked = false;    ///< the launcher had told it to stop
  bool starved = false;  ///< the kernel killed it for want of memory
  char stuck = 0;        ///< state letter of /proc when it was killed since it did not stop; 0: it stopped
  double hung_s = 0.0;   ///< it was killed since it had given no sign of life for so long; 0: it was not
  double at = 0.0;       ///< when its end was seen, in seconds in which the launcher ran
};

/// The exit code as a shell counts it: 128+N for signal N; kOutOfMemory where the kernel had no memory left,
/// kCommunication for a rank that hung.
int exit_code(const RankExit& exit);

/// The meaning of an exit code of ours, " (damaged data)"; empty where it has none of its own.
std::string_view meaning(int code);

/// Whether a rank of ours that ends like this has said itself why, and lost no peer: the codes of typed
/// errors but kCommunication.
bool explains_itself(const RankExit& exit);

/// Whether the rank failed because another one did, or did not come.
bool lost_a_peer(const RankExit& exit);

/// A state letter of /proc in words, for a process that was killed: "it had been stopped by a signal".
std::string_view state_in_words(char letter);

/// "SIGTERM".
std::string signal_name(int number);

/// is_stop_code() or 75: the rank heeded a signal and stopped in good order.
bool stopped_in_order(const RankExit& exit);

/// The exit that most likely caused the others: not asked to stop before asked, a signal before an exit code,
/// another code before kCommunication (such a rank lost a peer), earlier before later. `failures` must not be
/// empty.
const RankExit& culprit(std::span<const RankExit> failures);

/// "rank 1 (pid 123) was killed by signal 9 (SIGKILL)", "rank 1 (pid 123) exited with code 7 (damaged data)".
/// `ours`: the codes of the program are those of this one; else they are not explained.
std::string describe(const RankExit& exit, bool ours = true);

/// The likely cause of such an end and where to look, as "; ..."; empty when there is none to name.
std::string hint(const RankExit& exit);

}  // namespace trireme::launch
