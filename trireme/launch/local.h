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
#include "trireme/launch/pipe.h"
#include "trireme/launch/signals.h"

namespace trireme::launch {

struct LocalJob {
  std::string program;            ///< absolute path of the executable
  std::vector<std::string> args;  ///< without argv[0]
  int64_t ranks = 1;
  Environment environment;  ///< base environment; the rank variables are added
  /// The program calls serve_forks() (launch/fork_server.h): several ranks load it once.
  bool serves_forks = false;
  std::string log_dir;    ///< rank-N.log files go here; empty: none
  double grace_s = 5.0;   ///< from a rank's failure to the SIGKILL of those that still run
  double stop_s = 120.0;  ///< from a signal to stop to the SIGKILL of ranks that have not stopped
  /// A job that still runs after so long is killed, with the code 128+SIGALRM; 0: there is no limit.
  double limit_s = 0.0;
  bool usr1_stops = true;  ///< SIGUSR1 is one; else it is passed on to the ranks each time, and no more
  /// A rank that gives no sign of life (base/heartbeat.h) for so long is named and killed, and counts as
  /// failed with kCommunication; 0: none is. For programs that give some as they get on. Time in which the
  /// launcher did not run itself, as when the whole job is suspended, does not count.
  double silence_s = 0.0;
  /// The program is one of ours: a rank that exits with the code of a typed error has printed why. Then the
  /// output of ranks that only lost a peer is not shown, and the launcher adds nothing once all ranks have
  /// ended by themselves.
  bool explains_failures = false;
  std::string stop_notice = {};  ///< logged when the first signal to stop is passed on; empty: nothing
  /// Advice on what to change, asked for when the kernel has killed a rank for want of memory; empty: none.
  std::function<std::string()> memory_advice = {};
  std::string kernel_counters = "/proc/vmstat";  ///< where "oom_kill" counts such processes
  double starved_s = 10.0;  ///< a SIGKILL this soon after a kill by the kernel counts as the kernel's
};

struct JobEnd {
  int code = 0;                        ///< the job's exit code, as run_local() returns it
  std::optional<RankExit> cause = {};  ///< the failure that decides the code; none: there was none
  std::vector<RankExit> exits = {};    ///< of all ranks, in the order seen
  std::vector<Flight> flights = {};    ///< by rank; empty where there was no memory to keep them
  bool output_lost = false;  ///< stdout did not take all that rank 0 wrote, though somebody reads it
  int signal = 0;            ///< that asked the launcher to stop; 0: none
};

/// Runs jobs one after the other. As long as it lives, signals to stop are input to it: also one that comes
/// between two jobs is not lost. A process has one at a time.
class Launcher {
 public:
  /// Throws EnvironmentError when the process is out of descriptors.
  Launcher() = default;

  /// Runs as run_local() does, and returns all that is known of the end.
  JobEnd run(const LocalJob& job);

  /// Waits for `seconds`, or until a signal asks to stop, which it returns.
  std::optional<int> pause(double seconds);

 private:
  const Descriptor null_ = open_null();  ///< first, since it also fills descriptors 0 to 2
  SignalTrap signals_;
};

/// Runs the job to its end and returns its exit code: 0 when all ranks returned 0, else that of the first
/// rank that failed (128+N for signal N, kOutOfMemory for one that the kernel killed for want of memory), and
/// kEnvironment where none failed but output of rank 0 was lost.
///
/// Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR=127.0.0.1, MASTER_PORT,
/// TRIREME_LAUNCHER=trireme, TRIREME_JOB_KEY (random, the same for all), and OMP_NUM_THREADS (cores / ranks)
/// unless set. The launcher binds the rendezvous socket to a free loopback port itself and rank 0 inherits it
/// as TRIREME_LISTEN_FD, so that no port is ever guessed. stdin of all ranks is empty. All inherit
/// TRIREME_FLIGHT_FD, a record (base/flight_record.h) in which they note their operations; the launcher reads
/// it when a rank has died.
///
/// stdout of rank 0 passes through untouched; stderr of every rank and stdout of ranks above 0 go to stderr
/// line by line, prefixed "[r1] " (rank 0 unprefixed), and all of it to log_dir. A line that several ranks
/// print within a short time is shown once with "(x4 ranks)". Where stderr is a terminal, rank 0's stderr
/// passes as it comes, so that it may draw a progress bar: it inherits the terminal as TRIREME_TTY_FD, to ask
/// for its width whenever it draws, and the one behind stdout as TRIREME_OUT_TTY_FD.
///
/// SIGINT, SIGTERM, SIGHUP and, with usr1_stops, SIGUSR1 ask to stop: they are forwarded once, each as it is,
/// to all ranks, which finish what they began; when the signal ends a
/// rank's process at once, as it does a shell, the processes that it started are sent SIGTERM and finish
/// likewise. Ranks that still run `stop_s` later are named and killed; a second signal kills at once, unless
/// it comes within a second of the first: terminals and launchers around this one often send the same request
/// twice. Ranks run in their own process groups. A rank's process dies with the launcher (PDEATHSIG),
/// whatever happens to it. The processes that it started die with it, unless the launcher itself was ended by
/// SIGKILL.
///
/// Throws ConfigError for impossible numbers and EnvironmentError when the program, a log or a process cannot
/// be had; ranks that were started by then are killed.
int run_local(const LocalJob& job);

}  // namespace trireme::launch
