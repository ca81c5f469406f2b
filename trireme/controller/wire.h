#pragma once
// Frames between the processes of a controller, and the connection that carries them. A frame is a header of
// 24 bytes, little-endian, and a body:
//   u32 magic "TRCF" | u16 version | u16 type | u32 length of the body | u32 check | u64 sequence
// The sequence numbers the frames of one direction from 0, so a lost, doubled or replayed frame is seen; the
// check is part of an XXH3 over the body and the rest of the header, so a changed one is.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "trireme/base/descriptor.h"
#include "trireme/controller/channel.h"

namespace trireme::controller {

inline constexpr uint16_t kWireVersion = 2;
inline constexpr size_t kHeaderBytes = 24;
inline constexpr size_t kMostBodyBytes = 1 << 20;
inline constexpr size_t kMostBytesOfStrangers = 1 << 10;  ///< of a body before its sender is known
inline constexpr size_t kMostQueuedBytes = 64 << 20;      ///< unread by a peer before it is given up

struct Frame {
  uint16_t type = 0;
  std::string body = {};
};

/// The bytes of a frame. Throws LogicError for a body above kMostBodyBytes.
std::string frame_bytes(uint16_t type, uint64_t sequence, std::string_view body);

/// Finds the frames in bytes that arrive in pieces of any size.
class FrameReader {
 public:
  /// Bodies above `bytes` are refused from the next header on.
  void set_most_body(size_t bytes) { most_body_ = bytes; }

  void feed(std::string_view bytes);
  /// The next whole frame. Throws CommError, now and from then on, for what is no frame: another magic or
  /// version, a body that is too long, a wrong check or number.
  std::optional<Frame> next();

  /// Where the rest of a long body may be read to, without a copy; empty where none is under way. Valid until
  /// the next call.
  std::span<char> body_space();
  /// `count` bytes have been put into body_space().
  void took(size_t count) { have_ += count; }

 private:
  void read_header();
  Frame finished();

  struct Header {
    uint16_t type = 0;
    uint32_t length = 0, check = 0;
  };

  size_t most_body_ = kMostBodyBytes;
  std::string unread_;  ///< fed and not looked at, from read_at_ on
  size_t read_at_ = 0;
  std::optional<Header> header_;
  std::string body_;  ///< of header_, its first have_ bytes are there
  size_t have_ = 0;
  uint64_t sequence_ = 0;  ///< of the frame under way
};

/// A connected socket with queues in both directions, whose bytes a channel carries. It never blocks but
/// where a deadline is given. One thread may read while another one writes.
class Connection {
 public:
  using Clock = std::chrono::steady_clock;

  /// Makes the channel of a socket, which outlives it.
  using MakeChannel = std::function<std::unique_ptr<Channel>(int fd)>;

  /// `peer`: for messages, such as "the dispatcher at unix:/run/x". The socket is made non-blocking.
  Connection(Descriptor socket, std::string peer, const MakeChannel& channel = plain_channel);

  int fd() const { return socket_.get(); }
  const std::string& peer() const { return peer_; }
  void set_peer(std::string peer) { peer_ = std::move(peer); }
  void set_most_body(size_t bytes) { reader_.set_most_body(bytes); }
  void set_most_queued(size_t bytes) { most_queued_ = bytes; }

  /// Waits until the peer has proved who it is, where the channel wants that. Throws CommError that names the
  /// peer when it does not, is gone, or `deadline` passes.
  void establish(Clock::time_point deadline);
  /// Events of poll(2) after which pump() and read_some() have something to do.
  short events() const;

  /// Reads once what is there now. False: the peer has closed the connection or broken it. Throws CommError
  /// that names the peer when it did not prove who it is.
  bool read_some();
  /// The next frame of those that were read. Throws CommError that names the peer.
  std::optional<Frame> next();
  /// Waits for the next frame. Throws CommError when the peer is gone or `deadline` passes.
  Frame receive(Clock::time_point deadline);

  /// Queues a frame and writes what the socket takes now. Throws CommError when more bytes than allowed wait
  /// for the peer to read them; a peer that is gone is told by read_some().
  void send(uint16_t type, std::string_view body);
  /// Writes what the socket takes now.
  void pump();
  /// Waits until not more than `most_left` bytes are unwritten. Throws CommError at the deadline, and when
  /// the peer is gone.
  void flush(Clock::time_point deadline, size_t most_left = 0);
  size_t queued() const { return queued_; }
  /// Whether the peer does not take what is written.
  bool broken() const { return broken_; }

  /// Ends both directions: threads that wait in receive() wake up. The descriptor stays until the end.
  void shut_down();

 private:
  Descriptor socket_;
  std::unique_ptr<Channel> channel_;
  std::string peer_;
  FrameReader reader_;
  size_t most_queued_ = kMostQueuedBytes, queued_ = 0;
  std::deque<std::string> queue_;
  size_t written_ = 0;  ///< bytes of the queue's first that are out
  uint64_t sequence_ = 0;
  bool broken_ = false;
};

/// `seconds` from now.
inline Connection::Clock::time_point after_seconds(double seconds) {
  return Connection::Clock::now() +
         std::chrono::duration_cast<Connection::Clock::duration>(std::chrono::duration<double>(seconds));
}

/// Waits for `events` of poll(2) at `fd`; false: the deadline has passed.
bool wait_for(int fd, short events, Connection::Clock::time_point deadline);

}  // namespace trireme::controller
