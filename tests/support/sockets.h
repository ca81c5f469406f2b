#pragma once
// What the kernel has sent for this process over TCP.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>

#include "trireme/comm/group.h"

namespace trireme::test {

/// Payload bytes that each open TCP socket of this process has put on the network, by inode; headers of TCP
/// not counted.
inline std::map<ino_t, int64_t> sent_by_sockets() {
  std::map<ino_t, int64_t> sent;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::stoi(entry.path().filename().string());
    tcp_info info{};
    socklen_t size = sizeof info;
    struct stat file {};
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || ::fstat(fd, &file) != 0) continue;
    if (size >= offsetof(tcp_info, tcpi_bytes_sent) + sizeof info.tcpi_bytes_sent) {
      sent[file.st_ino] = static_cast<int64_t>(info.tcpi_bytes_sent - info.tcpi_bytes_retrans);
    }
  }
  return sent;
}

/// What sockets carry for the ranks of a group, threads of this process, from the construction on. Where they
/// met over an in-memory store, that is all they send each other as messages. All ranks make it and ask it.
class CarriedBytes {
 public:
  explicit CarriedBytes(comm::Group& group) : group_(group) {
    group_.barrier();
    if (group_.rank() == 0) before_ = sent_by_sockets();
    group_.barrier();
  }

  /// On rank 0; zero on the others. Sockets that have been closed do not count: those of groups that ended
  /// before this one are closed by threads of their own, at any time.
  int64_t so_far() {
    group_.barrier();
    int64_t sum = 0;
    if (group_.rank() == 0) {
      for (const auto& [inode, bytes] : sent_by_sockets()) {
        const auto found = before_.find(inode);
        sum += bytes - (found == before_.end() ? 0 : found->second);
      }
    }
    group_.barrier();
    return sum;
  }

 private:
  comm::Group& group_;
  std::map<ino_t, int64_t> before_;
};

}  // namespace trireme::test
