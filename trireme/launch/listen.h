#pragma once
// The rendezvous socket: bound before any rank is started, so that every rank knows its port and no other
// process can take it.
#include <cstdint>
#include <string>

#include "trireme/launch/pipe.h"

namespace trireme::launch {

struct ListenSocket {
  Descriptor fd;  ///< closes on exec, except in the child that is told to keep it
  int64_t port = 0;
};

/// A TCP socket that listens on 127.0.0.1 at a port the kernel picks. Ranks may connect at once: the kernel
/// queues them until rank 0 accepts. Throws EnvironmentError.
ListenSocket listen_on_loopback();
/// Likewise at `host`, an address of this host in numbers, of IPv4 or IPv6, and at no other one.
ListenSocket listen_at(const std::string& host);

}  // namespace trireme::launch
