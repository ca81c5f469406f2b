#pragma once
// Signals as input of the poll loop, not as interruptions: blocked, and read from a signalfd.
#include <csignal>
#include <optional>

#include "trireme/launch/pipe.h"

namespace trireme::launch {

/// While it lives, SIGINT, SIGTERM, SIGUSR1 and SIGHUP of the calling thread are read from fd(), and writing
/// to a closed pipe gives EPIPE. A process with several threads must have blocked these signals in the
/// others.
class SignalTrap {
 public:
  SignalTrap();
  ~SignalTrap();
  SignalTrap(const SignalTrap&) = delete;
  SignalTrap& operator=(const SignalTrap&) = delete;

  int fd() const { return fd_.get(); }

  /// The next of these; nothing when there is none. Does not block.
  std::optional<int> next();

  /// The mask that a new program starts with.
  sigset_t child_mask() const;

 private:
  sigset_t old_mask_{};
  struct sigaction old_child_action_ {};
  Descriptor fd_;
};

}  // namespace trireme::launch
