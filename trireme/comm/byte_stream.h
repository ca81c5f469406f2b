#pragma once
// Bytes that go from one process to another in order, without waiting for anybody: through memory that both
// map, or over TCP. Internal to this room.
#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace trireme::comm {

/// One end of it. One thread at a time calls write(), read() and wait().
class ByteStream {
 public:
  virtual ~ByteStream() = default;
  /// On the writing end: takes the first of `bytes` and returns how many; 0 when there is no room now. Throws
  /// std::runtime_error when the reader has gone.
  virtual size_t write(std::span<const std::byte> bytes) = 0;
  /// On the reading end: fills the first of `bytes` and returns how many; 0 when nothing has come. Throws
  /// std::runtime_error when the writer has gone and everything of it was read.
  virtual size_t read(std::span<std::byte> bytes) = 0;
  /// Returns when there may be something to write, read or throw, and after `limit` in any case.
  virtual void wait(std::chrono::milliseconds limit) = 0;
  /// Nothing is written or read here any more: the other end is told, and wait() returns. Any thread may
  /// call.
  virtual void close() = 0;
};

/// What the reader tells the writer, so that the two can be connected.
class StreamOffer {
 public:
  virtual ~StreamOffer() = default;
  virtual std::string text() const = 0;
  /// After the writer has connected: the end that reads. Throws CommError when it has not within `timeout_s`.
  virtual std::unique_ptr<ByteStream> accept(double timeout_s) = 0;
};

/// Through memory of this host. None when there is not enough of it.
std::unique_ptr<StreamOffer> offer_memory_stream();
/// The end that writes; none when the memory cannot be mapped here, as on another host.
std::unique_ptr<ByteStream> open_memory_stream(const std::string& offer);

/// Over TCP to this rank's `address`. Throws CommError when nobody can listen there.
std::unique_ptr<StreamOffer> offer_socket_stream(const std::string& address);
/// The end that writes. Throws CommError when there is no connection within `timeout_s`.
std::unique_ptr<ByteStream> open_socket_stream(const std::string& offer, double timeout_s);

}  // namespace trireme::comm
