#include "trireme/launch/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

#include "trireme/base/error.h"

namespace trireme::launch {
namespace {

/// SIGHUP stays ignored under nohup, which is how a user asks for it.
bool is_ignored(int number) {
  struct sigaction action {};
  ::sigaction(number, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

sigset_t trapped_signals() {
  sigset_t set{};
  for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGPIPE}) sigaddset(&set, number);
  if (!is_ignored(SIGHUP)) sigaddset(&set, SIGHUP);
  return set;
}

/// A SIGPIPE of ours must not strike when the old mask comes back.
void forget_pending_sigpipe() {
  sigset_t only_pipe{};
  sigaddset(&only_pipe, SIGPIPE);
  const timespec at_once{};
  ::sigtimedwait(&only_pipe, nullptr, &at_once);
}

}  // namespace

SignalTrap::SignalTrap() {
  const sigset_t set = trapped_signals();
  fd_ = Descriptor(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_)
    throw EnvironmentError("[launch] cannot create a signalfd: {}; raise the open-file limit (ulimit -n)",
                           errno_text(errno));
  ::pthread_sigmask(SIG_BLOCK, &set, &old_mask_);
  // A parent that ignores SIGCHLD passes that on; children would then vanish without an exit code.
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &standard, &old_child_action_);
}

SignalTrap::~SignalTrap() {
  forget_pending_sigpipe();
  ::sigaction(SIGCHLD, &old_child_action_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

std::optional<int> SignalTrap::next() {
  signalfd_siginfo info{};
  while (::read(fd_.get(), &info, sizeof info) == sizeof info) {
    if (info.ssi_signo != SIGPIPE) return static_cast<int>(info.ssi_signo);
  }
  return std::nullopt;
}

sigset_t SignalTrap::child_mask() const {
  sigset_t mask = old_mask_;
  for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) sigdelset(&mask, number);
  return mask;
}

}  // namespace trireme::launch
