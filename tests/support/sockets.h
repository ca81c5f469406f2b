#pragma once
// What the kernel has sent for this process over TCP.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>

namespace trireme::test {

/// Payload bytes that the open TCP sockets of this process have put on the network, headers of TCP not
/// counted. Where ranks are threads over an in-memory store, that is all they have sent each other as
/// messages.
inline int64_t socket_bytes_sent() {
  int64_t sum = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::stoi(entry.path().filename().string());
    tcp_info info{};
    socklen_t size = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    if (size >= offsetof(tcp_info, tcpi_bytes_sent) + sizeof info.tcpi_bytes_sent) {
      sum += static_cast<int64_t>(info.tcpi_bytes_sent - info.tcpi_bytes_retrans);
    }
  }
  return sum;
}

}  // namespace trireme::test
