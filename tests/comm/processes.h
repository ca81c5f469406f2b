#pragma once
// Ranks as forked processes, and sockets for them.
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/base/descriptor.h"

namespace trireme::test {

/// Exit codes by rank of `ranks` forked processes that run `body` and return its result; 100 when it threw,
/// minus the signal when one ended it. Processes that live after `limit_s` are killed.
std::vector<int> fork_ranks(int64_t ranks, const std::function<int(int64_t rank)>& body,
                            double limit_s = 30.0);

/// Made before ranks fork, opened by one of them, which lets the others go on: a rank that is to live as long
/// as another one needs it.
class Gate {
 public:
  Gate();

  void open() const;
  /// False when nobody has opened it within `limit_s`.
  bool wait(double limit_s) const;

 private:
  Descriptor event_;
};

/// 0 when `call` throws a CommError with all `words` within `limit_s`, in which this process could run; says
/// on stderr what is missing.
int expect_comm_error(const std::function<void()>& call, const std::vector<std::string>& words,
                      double limit_s);

/// A listening TCP socket on 127.0.0.1 with a port of the kernel's choice.
struct Listener {
  int fd = -1;
  int64_t port = 0;
};
Listener listen_on_loopback();

/// A port on which nobody listened a moment ago.
int64_t free_port();

/// Local addresses in /proc/net/tcp and tcp6 that listen on `port`, as the kernel prints them ("0100007F").
std::vector<std::string> listening_addresses(int64_t port);

/// Two network namespaces with a cable between them. Leaves nothing behind.
class TwoHosts {
 public:
  TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;
  ~TwoHosts();

  /// False where this process may not make them.
  bool made() const { return made_; }
  /// This thread, and what it starts, is on `host`, 0 or 1, from here on.
  void enter(int64_t host) const;
  /// Takes the link down: packets are lost, and nobody is told.
  void part() const;
  static std::string address(int64_t host);

 private:
  std::string name(int64_t host) const;
  static bool ip(const std::string& words);

  pid_t owner_ = ::getpid();
  bool made_ = false;
};

}  // namespace trireme::test
