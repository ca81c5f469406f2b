#include "trireme/controller/data_connection.h"

#include <unistd.h>

#include <algorithm>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/controller/data_address.h"

namespace trireme::controller {
namespace {

constexpr size_t kMostUnread = 2 << 20;

Connection connect_to_worker(const WorkerInfo& worker, const Environment& environment, double timeout_s) {
  const DataAddress data = parse_data_address(worker.data_address);
  const std::string name = fmt::format("worker {} (pid {} on {})", worker.number, worker.pid, worker.host);
  const auto deadline = after_seconds(timeout_s);
  if (data.address.is_beyond()) return connect_to(data.address, *tls_by_secret(data.secret), name, deadline);
  return connect_to(data.address, environment, name, deadline);
}

}  // namespace

Piece piece_of(const Frame& frame) {
  if (!is<Data>(frame))
    throw CommError("[controller.data] {} came where DATA was due", message_name(frame.type));
  Reader reader(frame.body, "DATA");
  Piece piece{
      .id = reader.u64(), .total = reader.u64(), .offset = reader.u64(), .bytes = reader.view(kMostChunk)};
  reader.end();
  if (piece.offset <= piece.total && piece.bytes.size() <= piece.total - piece.offset) return piece;
  reader.refuse(
      fmt::format("bytes {} to {} of {}", piece.offset, piece.offset + piece.bytes.size(), piece.total));
}

void send_pieces(Connection& connection, uint64_t id, std::string_view bytes, double timeout_s) {
  size_t offset = 0;
  do {
    const std::string_view piece = bytes.substr(offset, kMostChunk);
    Writer writer;
    writer.reserve(piece.size() + 64);
    writer.u64(id);
    writer.u64(bytes.size());
    writer.u64(offset);
    writer.text(piece, kMostChunk);
    connection.send(static_cast<uint16_t>(Data::kType), writer.take());
    connection.flush(after_seconds(timeout_s), kMostUnread);
    offset += piece.size();
  } while (offset < bytes.size());
  connection.flush(after_seconds(timeout_s));
}

DataConnection::DataConnection(const WorkerInfo& worker, uint64_t session, const Environment& environment,
                               const std::string& build, double timeout_s)
    : connection_(connect_to_worker(worker, environment, timeout_s)), timeout_s_(timeout_s) {
  Hello hello{.role = Role::kClient, .version = kVersion, .build = build, .pid = ::getpid(), .host = {}};
  hello.session = session;
  send(connection_, hello);
  message_of<Welcome>(answer());
}

Frame DataConnection::answer() {
  Frame frame = connection_.receive(after_seconds(timeout_s_));
  if (is<Reject>(frame))
    throw CommError("{} (from {})", message_of<Reject>(frame).reason, connection_.peer());
  return frame;
}

void DataConnection::put(uint64_t id, std::string_view bytes) {
  try {
    send_pieces(connection_, id, bytes, timeout_s_);
  } catch (const CommError&) {
    // A worker that refuses them says why before it closes.
    const Frame frame = connection_.receive(after_seconds(1.0));
    if (is<Reject>(frame))
      throw CommError("{} (from {})", message_of<Reject>(frame).reason, connection_.peer());
    throw;
  }
  message_of<DataDone>(answer());
}

std::string DataConnection::take(uint64_t id) {
  send(connection_, Take{.id = id, .timeout_ms = static_cast<uint64_t>(1e3 * timeout_s_)});
  std::string bytes;
  while (true) {
    const Frame frame = answer();
    const Piece piece = piece_of(frame);
    if (piece.id != id || piece.offset != bytes.size())
      throw CommError("[controller.data] {} sent other bytes than it was asked for", connection_.peer());
    if (piece.offset == 0) bytes.reserve(piece.total);
    bytes.append(piece.bytes);
    if (bytes.size() >= piece.total) return bytes;
  }
}

}  // namespace trireme::controller
