#include "trireme/controller/wire.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"

namespace trireme::controller {
namespace {

constexpr uint32_t kMagic = 0x46435254;  // "TRCF"
constexpr size_t kReadBytes = 64 << 10;
/// Bodies of which more than this is missing are read in place.
constexpr size_t kWorthItsOwnRead = Channel::kLeastRoom;
static_assert(kReadBytes >= Channel::kLeastRoom);

template <typename Number>
void put_number(std::string& bytes, Number number) {
  for (size_t i = 0; i < sizeof number; ++i)
    bytes += static_cast<char>(static_cast<uint64_t>(number) >> (8 * i) & 0xff);
}

template <typename Number>
Number number_at(std::string_view bytes, size_t at) {
  uint64_t number = 0;
  for (size_t i = sizeof(Number); i-- > 0;) number = number << 8 | static_cast<unsigned char>(bytes[at + i]);
  return static_cast<Number>(number);
}

uint32_t check_of(uint16_t type, uint64_t sequence, std::string_view body) {
  return static_cast<uint32_t>(xxh3(body, mix64(uint64_t{type} << 32 | body.size(), sequence)));
}

}  // namespace

std::string frame_bytes(uint16_t type, uint64_t sequence, std::string_view body) {
  TRIREME_CHECK(body.size() <= kMostBodyBytes,
                "[controller.wire] a body of {} bytes; at most {} fit in a frame", body.size(),
                kMostBodyBytes);
  std::string bytes;
  bytes.reserve(kHeaderBytes + body.size());
  put_number(bytes, kMagic);
  put_number(bytes, kWireVersion);
  put_number(bytes, type);
  put_number(bytes, static_cast<uint32_t>(body.size()));
  put_number(bytes, check_of(type, sequence, body));
  put_number(bytes, sequence);
  return bytes.append(body);
}

void FrameReader::feed(std::string_view bytes) {
  if (read_at_ > 0) unread_.erase(0, std::exchange(read_at_, 0));
  unread_.append(bytes);
}

void FrameReader::read_header() {
  const std::string_view bytes = std::string_view(unread_).substr(read_at_, kHeaderBytes);
  const auto magic = number_at<uint32_t>(bytes, 0);
  if (magic != kMagic) {
    throw CommError(
        "[controller.wire] these are no frames of Trireme: they begin with {:08x}; check the "
        "address and the port",
        magic);
  }
  const auto version = number_at<uint16_t>(bytes, 4);
  if (version != kWireVersion) {
    throw CommError(
        "[controller.wire] the peer speaks version {} of the protocol, this process version {}; "
        "use one build of Trireme for all of them",
        version, kWireVersion);
  }
  Header header{.type = number_at<uint16_t>(bytes, 6),
                .length = number_at<uint32_t>(bytes, 8),
                .check = number_at<uint32_t>(bytes, 12)};
  if (header.length > most_body_) {
    throw CommError("[controller.wire] a frame of type {} has {} bytes, {} are allowed here; it is refused",
                    header.type, header.length, most_body_);
  }
  const auto sequence = number_at<uint64_t>(bytes, 16);
  if (sequence != sequence_) {
    throw CommError("[controller.wire] frame {} came where {} was due; a frame was lost or sent twice",
                    sequence, sequence_);
  }
  read_at_ += kHeaderBytes;
  header_ = header;
  body_.resize(header.length);
  have_ = 0;
}

Frame FrameReader::finished() {
  const Header header = *std::exchange(header_, std::nullopt);
  if (check_of(header.type, sequence_, body_) != header.check) {
    header_ = header;  // refused again by the next call
    throw CommError("[controller.wire] the bytes of frame {}, of type {}, were changed on their way",
                    sequence_, header.type);
  }
  ++sequence_;
  return {.type = header.type, .body = std::move(body_)};
}

std::optional<Frame> FrameReader::next() {
  if (!header_) {
    if (unread_.size() - read_at_ < kHeaderBytes) return std::nullopt;
    read_header();
  }
  const size_t count = std::min(body_.size() - have_, unread_.size() - read_at_);
  std::memcpy(body_.data() + have_, unread_.data() + read_at_, count);
  have_ += count;
  read_at_ += count;
  if (have_ < body_.size()) return std::nullopt;
  return finished();
}

std::span<char> FrameReader::body_space() {
  if (!header_ || read_at_ < unread_.size()) return {};
  return {body_.data() + have_, body_.size() - have_};
}

bool wait_for(int fd, short events, Connection::Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Connection::Clock::now());
    pollfd entry{.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30)));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

Connection::Connection(Descriptor socket, std::string peer, const MakeChannel& channel)
    : socket_(std::move(socket)), channel_(channel(socket_.get())), peer_(std::move(peer)) {
  ::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
}

void Connection::establish(Clock::time_point deadline) {
  while (!channel_->established()) {
    const bool open = read_some();
    if (channel_->established()) return;
    if (!open) {
      throw CommError(
          "[controller.wire] {} closed the connection before it had proved who it is; check that a server of "
          "Trireme listens there, and that this host may connect to it",
          peer_);
    }
    if (!wait_for(fd(), channel_->read_events(), deadline)) {
      throw CommError("[controller.wire] {} did not prove who it is within its time; it is stopped, or busy",
                      peer_);
    }
  }
}

short Connection::events() const {
  return static_cast<short>(channel_->read_events() | (queued_ > 0 ? channel_->write_events() : 0));
}

bool Connection::read_some() {
  thread_local std::array<char, kReadBytes> scratch;
  const std::span<char> space = reader_.body_space();
  const bool in_place = space.size() >= kWorthItsOwnRead;
  const std::span<char> target = in_place ? space : std::span<char>(scratch);
  Channel::Moved got;
  try {
    got = channel_->read(target);
  } catch (const CommError& error) {
    throw CommError("{} (from {})", error.what(), peer_);
  }
  if (got.bytes == 0) return got.open;
  in_place ? reader_.took(got.bytes) : reader_.feed({target.data(), got.bytes});
  return true;
}

std::optional<Frame> Connection::next() {
  try {
    return reader_.next();
  } catch (const CommError& error) {
    throw CommError("{} (from {})", error.what(), peer_);
  }
}

Frame Connection::receive(Clock::time_point deadline) {
  while (true) {
    if (auto frame = next()) return std::move(*frame);
    if (!wait_for(fd(), channel_->read_events(), deadline)) {
      throw CommError("[controller.wire] {} sent nothing within its time; it is stopped, or busy elsewhere",
                      peer_);
    }
    if (!read_some()) {
      if (auto frame = next()) return std::move(*frame);
      throw CommError("[controller.wire] {} closed the connection", peer_);
    }
  }
}

void Connection::send(uint16_t type, std::string_view body) {
  if (broken_) return;
  queue_.push_back(frame_bytes(type, sequence_++, body));
  queued_ += queue_.back().size();
  pump();
  if (queued_ > most_queued_) {
    throw CommError("[controller.wire] {} reads too slowly: {} wait for it and {} may", peer_,
                    format_bytes(static_cast<double>(queued_)),
                    format_bytes(static_cast<double>(most_queued_)));
  }
}

void Connection::pump() {
  while (!queue_.empty() && !broken_) {
    const std::string_view rest = std::string_view(queue_.front()).substr(written_);
    const Channel::Moved moved = channel_->write(rest);
    broken_ = !moved.open;
    if (broken_) break;
    if (moved.bytes == 0) return;
    queued_ -= moved.bytes;
    written_ += moved.bytes;
    if (written_ < queue_.front().size()) continue;
    queue_.pop_front();
    written_ = 0;
  }
  if (!broken_) return;
  queue_.clear();
  queued_ = 0;
}

void Connection::flush(Clock::time_point deadline, size_t most_left) {
  for (pump(); queued_ > most_left; pump()) {
    if (!wait_for(fd(), channel_->write_events(), deadline)) {
      throw CommError(
          "[controller.wire] {} did not read {} within their time; it is stopped, or busy elsewhere", peer_,
          format_bytes(static_cast<double>(queued_)));
    }
  }
  if (broken_) throw CommError("[controller.wire] {} closed the connection", peer_);
}

void Connection::shut_down() {
  ::shutdown(socket_.get(), SHUT_RDWR);
}

}  // namespace trireme::controller
