#pragma once
// Ranks that load their program once for all: a server has loaded it, and each rank is a fork of the server.
// libtorch alone takes 0.2 s of a core to load, which is most of what 64 ranks do before their first step;
// and the pages that loading has written are shared. The name is that of Python's multiprocessing.
#include <optional>

#include "trireme/launch/child.h"

namespace trireme::launch {

/// Forks children of the calling process off a program that calls serve_forks(). While it lives, the server
/// runs beside them.
class ForkServer {
 public:
  /// Runs `program`: its streams and descriptors do not matter to the children. Does not wait for it to load.
  explicit ForkServer(ChildSpec program);

  /// A process that goes on behind serve_forks() with the environment, streams and descriptors of `spec`; its
  /// program, arguments and blocked signals are the server's. Waits for the server to load, at most until
  /// `interrupt_fd` is readable. None: here nothing can be forked so (an old kernel, a sandbox, a program
  /// with threads, one that fails to load), and the caller runs the program instead, which tells why if it
  /// cannot.
  std::optional<Child> fork(const ChildSpec& spec, int interrupt_fd);

 private:
  Descriptor socket_;  ///< closed: nothing can be forked
  std::optional<Child> server_;
};

/// The first call of such a program's main(), before it makes threads. Returns at once unless a ForkServer
/// has started the program. Then it serves, returns in each child, and ends the server when its ForkServer
/// goes.
void serve_forks();

}  // namespace trireme::launch
