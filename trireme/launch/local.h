#pragma once
// Starts the ranks of one host as child processes and watches them: one dies, the rest are stopped; signals
// are forwarded; no rank survives the launcher.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/base/flight_record.h"
#include "trireme/launch/exits.h"
#include "trireme/launch/fd.h"
#include "trireme/launch/signals.h"

namespace trireme::launch {

struct LocalJob {
  std::string program;            ///< absolute path of the executable
  std::vector<std::string> args;  ///< without argv[0]
  int64_t ranks = 1;
  Environment environment;  ///< base environment; the rank variables are added
  std::string log_dir;      ///< rank-N.log files go here; empty: none
  double grace_s = 5.0;     ///< from a rank's failure to the SIGKILL of those that still run
  double stop_s = 120.0;    ///< from a SIGTERM or SIGINT to the SIGKILL of ranks that have not stopped
  /// Ranks that end with the code of a typed error have said why, or one of them has for all. Then those that
  /// lost them are not shown, and nothing is added once all have ended by themselves.
  bool explains_failures = false;
  std::string stop_notice = {};  ///< logged when the first SIGTERM or SIGINT is passed on; empty: nothing
  /// What to change, asked when the kernel has killed a rank for want of memory; empty: there is no advice.
  std::function<std::string()> memory_advice = {};
  std::string kernel_counters = "/proc/vmstat";  ///< where "oom_kill" counts such processes
  double starved_s = 10.0;  ///< a rank that is killed later after the kernel killed any is none of them
};

struct JobEnd {
  int code = 0;                        ///< the job's exit code, as run_local() returns it
  std::optional<RankExit> cause = {};  ///< the failure that decides the code; none: there was none
  std::vector<RankExit> exits = {};    ///< of all ranks, in the order seen
  std::vector<Flight> flights = {};    ///< by rank; empty where there was no memory to keep them
  int signal = 0;                      ///< SIGINT or SIGTERM that asked the launcher to stop; 0: none
};

/// Runs jobs one after the other. As long as it lives, signals to stop are input to it: also one that comes
/// between two jobs is not lost. A process has one at a time.
class Launcher {
 public:
  /// Throws EnvironmentError when the process is out of descriptors.
  Launcher() = default;

  /// As run_local(), with what it knows of the end.
  JobEnd run(const LocalJob& job);

  /// Waits for `seconds`, or until a signal asks to stop: then SIGINT or SIGTERM.
  std::optional<int> pause(double seconds);

 private:
  const Fd null_ = open_null();  ///< first, since it also fills descriptors 0 to 2
  SignalTrap signals_;
};

/// Runs the job to its end and returns its exit code: 0 when all ranks returned 0, else that of the first
/// rank that failed (128+N for signal N, kOutOfMemory for one that the kernel killed for want of memory).
///
/// Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR=127.0.0.1, MASTER_PORT,
/// TRIREME_LAUNCHER=trireme, TRIREME_JOB_KEY (random, the same for all), and OMP_NUM_THREADS (cores / ranks)
/// unless set. The launcher binds the
/// rendezvous socket to a free loopback port itself and rank 0 inherits it as TRIREME_LISTEN_FD, so that no
/// port is ever guessed. stdin of all ranks is empty. All inherit TRIREME_FLIGHT_FD, where they note what
/// they do, for who asks when one has died.
///
/// stdout of rank 0 passes through untouched; stderr of every rank and stdout of ranks above 0 go to stderr
/// line by line, prefixed "[r1] " (rank 0 unprefixed), and all of it to log_dir. A line that several ranks
/// print within a short time is shown once with "(x4 ranks)". Where stderr is a terminal, rank 0's stderr
/// passes as it comes, so that it may draw a progress bar: it inherits the terminal as TRIREME_TTY_FD, to ask
/// for its width whenever it draws, and the one behind stdout as TRIREME_OUT_TTY_FD.
///
/// SIGINT and SIGTERM are forwarded once to all ranks, which finish what they began; when the process of a
/// rank ends of it, as a shell does, what that started is sent SIGTERM and finishes likewise. Ranks that
/// still run `stop_s` later are named and killed; a second signal kills at once, unless it comes within a
/// second of the first: terminals and launchers around this one often send the same request twice. Ranks run
/// in their own process groups. Their processes die with the launcher (PDEATHSIG), whatever happens to it;
/// what these started dies with them, but not when the launcher itself is ended by SIGKILL.
///
/// Throws ConfigError for impossible numbers and EnvironmentError when the program, a log or a process cannot
/// be had; ranks that were started by then are killed.
int run_local(const LocalJob& job);

}  // namespace trireme::launch
