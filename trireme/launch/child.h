#pragma once
// One child process: started by fork and exec in its own process group, bound to die with its parent, watched
// through a pidfd.
#include <sys/types.h>

#include <csignal>
#include <string>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/launch/pipe.h"

namespace trireme::launch {

struct ChildSpec {
  std::string program;            ///< path of the executable; PATH is not searched
  std::vector<std::string> args;  ///< without argv[0]
  Environment environment;        ///< all of it: nothing is inherited
  int stdin_fd = -1;              ///< -1 for these three: inherit ours
  int stdout_fd = -1;
  int stderr_fd = -1;
  std::vector<int> keep_fds = {};  ///< stay open across exec under the same numbers
  sigset_t signal_mask{};          ///< blocked signals of the new program
};

/// How a process ended: by exit(code), or by a signal when `signal` is not 0.
struct ProcessEnd {
  int code = 0;
  int signal = 0;
};

/// Owns a process until it is reaped; destroying a Child that still runs kills its whole process group.
class Child {
 public:
  /// Returns once the new program runs. SIGINT and SIGTERM have their default action in it. It is killed when
  /// the calling *thread* ends. Throws EnvironmentError when the process cannot be made or the program not be
  /// run.
  explicit Child(const ChildSpec& spec);
  /// Owns `pid`, a child of this process that leads its own group.
  explicit Child(pid_t pid);
  Child(Child&& other) noexcept;
  Child& operator=(Child&&) = delete;
  ~Child();

  pid_t pid() const { return pid_; }
  bool running() const { return running_; }  ///< not yet reaped
  /// Readable once the process has ended; -1 where the kernel has no pidfds and has_ended() must be asked now
  /// and then.
  int wait_fd() const { return pidfd_.get(); }
  bool has_ended() const;
  /// The letter of its state in /proc: 'T' stopped, 'D' in the kernel, 'R' running, 'S' waiting; '?' unknown.
  char kernel_state() const;

  void signal(int number) const noexcept;        ///< to the process
  void signal_group(int number) const noexcept;  ///< to it and to what it started

  /// Whether processes that it started in its group still run, whether or not it has ended itself. Reads the
  /// process table.
  bool group_goes_on() const;

  /// Waits for the end, kills what it left behind in its group, and releases the pid.
  ProcessEnd reap() noexcept;

 private:
  pid_t pid_ = -1;
  Descriptor pidfd_;
  bool running_ = false;
};

}  // namespace trireme::launch
