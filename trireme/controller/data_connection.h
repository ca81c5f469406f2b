#pragma once
// Bulk bytes between the client and a worker, on a connection of their own: the client's side.
#include <cstdint>
#include <string>
#include <string_view>

#include "trireme/base/env.h"
#include "trireme/controller/address.h"
#include "trireme/controller/messages.h"

namespace trireme::controller {

/// Idle data connections end after so long; a client makes another one.
inline constexpr double kDataIdle_s = 3600.0;

class DataConnection {
 public:
  /// Connects to `worker` in `session`. Throws CommError.
  DataConnection(const WorkerInfo& worker, uint64_t session, const Environment& environment,
                 const std::string& build, double timeout_s);

  /// Puts the bytes under `id` at the worker; returns when they are there. Throws CommError: the worker is
  /// gone, holds too much, or does not take them before the deadline.
  void put(uint64_t id, std::string_view bytes);
  /// Takes what the worker offers under `id`, waiting for it. Throws CommError.
  std::string take(uint64_t id);

 private:
  Frame answer();

  Connection connection_;
  double timeout_s_;
};

/// Data in place: its bytes live as long as the frame.
struct Piece {
  uint64_t id = 0, total = 0, offset = 0;
  std::string_view bytes;
};
/// Throws CommError when the frame is none, or lies beyond its total.
Piece piece_of(const Frame& frame);

/// Sends the bytes in frames, with no more than a few of them unread. Throws CommError when the peer reads
/// none of them for `timeout_s`.
void send_pieces(Connection& connection, uint64_t id, std::string_view bytes, double timeout_s);

}  // namespace trireme::controller
