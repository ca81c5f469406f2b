#pragma once
// torch's store asks for the name of every address that it connects to, only to print it. A name server that
// is silent, or loses one of many such questions, then holds each connection for five seconds or more.
// Internal to this room.

namespace trireme::comm {

/// As long as it lives, its thread asks no name server: what /etc/hosts says is still found, and an address
/// needs no name. torch's warnings, which would tell of each name that was not found, are held back
/// meanwhile.
class WithoutNameServer {
 public:
  WithoutNameServer();
  WithoutNameServer(const WithoutNameServer&) = delete;
  WithoutNameServer& operator=(const WithoutNameServer&) = delete;
  ~WithoutNameServer();

 private:
  int servers_;
};

}  // namespace trireme::comm
