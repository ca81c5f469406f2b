#pragma once
// The bytes of a connected, non-blocking socket: as they are, or encrypted (tls.h).
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

namespace trireme::controller {

/// Nothing here blocks. One thread may read while another one writes.
class Channel {
 public:
  /// The outcome of a call. Open and without bytes: events() say what to wait for.
  struct Moved {
    size_t bytes = 0;
    bool open = true;  ///< false: the peer has closed the connection or broken it
  };

  /// A call with as much room leaves nothing behind that poll(2) would not report.
  static constexpr size_t kLeastRoom = 16 << 10;

  virtual ~Channel() = default;
  /// Reads once what is there now into `target`, which has kLeastRoom bytes or more. Throws CommError where
  /// the peer did not prove who it is; what it sends after that is thrown away.
  virtual Moved read(std::span<char> target) = 0;
  /// Writes the first of `bytes`, which are some; whoever writes again begins with the first unwritten one.
  virtual Moved write(std::string_view bytes) = 0;
  /// Events of poll(2) after which read() gets on.
  virtual short read_events() const = 0;
  /// Events of poll(2) after which write() gets on.
  virtual short write_events() const = 0;
  /// Whether the peer has proved who it is, if it must.
  virtual bool established() const = 0;
};

/// Bytes as they are; `fd` must outlive it.
std::unique_ptr<Channel> plain_channel(int fd);

}  // namespace trireme::controller
