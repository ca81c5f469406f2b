#include "trireme/controller/messages.h"

#include <array>

#include "trireme/base/build_info.h"
#include "trireme/base/hash.h"

namespace trireme::controller {
namespace {

constexpr std::array<const char*, 27> kMessageNames = {
    "nothing", "CHALLENGE",     "PROOF",          "HELLO",  "WELCOME",      "REJECT",     "WORLD",
    "SESSION", "SESSION_BEGIN", "SESSION_END",    "SCOPE",  "INSTRUCTIONS", "PROGRESS",   "ANSWER",
    "FAILED",  "RUN_ACTION",    "STATUS_REQUEST", "STATUS", "BYE",          "PING",       "PONG",
    "DATA",    "DATA_DONE",     "TAKE",           "STEP",   "REPLAY",       "DECLARATION"};

/// Bytes of the messages with empty texts.
constexpr size_t kLeastWorkerInfo = 2 * 8 + 3 * 4, kLeastWorkerStatus = kLeastWorkerInfo + 4 * 8;

Role role_of(Reader& reader) {
  const uint8_t number = reader.u8();
  if (number < static_cast<uint8_t>(Role::kClient) || number > static_cast<uint8_t>(Role::kObserver))
    reader.refuse(fmt::format("{} is no role", number));
  return static_cast<Role>(number);
}

template <typename Item, typename WriteOne>
void write_list(Writer& writer, const std::vector<Item>& items, const WriteOne& write_one,
                size_t most = kMostWorkers) {
  TRIREME_CHECK(items.size() <= most, "[controller.messages] {} items in a list of a message, {} fit",
                items.size(), most);
  writer.u32(static_cast<uint32_t>(items.size()));
  for (const Item& item : items) write_one(item);
}

template <typename Item, typename ReadOne>
void read_list(Reader& reader, std::vector<Item>& items, size_t bytes_each, const ReadOne& read_one,
               size_t most = kMostWorkers) {
  items.resize(reader.count(most, bytes_each));
  for (Item& item : items) read_one(item);
}

void write(Writer& writer, const WorkerInfo& message) {
  writer.i64(message.number);
  writer.i64(message.pid);
  writer.text(message.host, kMostName);
  writer.text(message.data_address, kMostName);
  writer.text(message.devices, kMostName);
}

void read(Reader& reader, WorkerInfo& message) {
  message.number = reader.i64();
  message.pid = reader.i64();
  message.host = reader.text(kMostName);
  message.data_address = reader.text(kMostName);
  message.devices = reader.text(kMostName);
}

void write(Writer& writer, const WorkerStatus& message) {
  write(writer, message.worker);
  writer.i64(message.cores);
  writer.u64(message.executed);
  writer.u64(message.queued_bytes);
  writer.i64(message.last_seen_ms);
}

void read(Reader& reader, WorkerStatus& message) {
  read(reader, message.worker);
  message.cores = reader.i64();
  message.executed = reader.u64();
  message.queued_bytes = reader.u64();
  message.last_seen_ms = reader.i64();
}

}  // namespace

const char* role_name(Role role) {
  return role == Role::kClient ? "client" : role == Role::kWorker ? "worker" : "observer";
}

void Writer::number(uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
}

void Writer::text(std::string_view text, size_t most) {
  TRIREME_CHECK(text.size() <= most, "[controller.messages] a text of {} bytes, {} fit", text.size(), most);
  u32(static_cast<uint32_t>(text.size()));
  bytes_.append(text);
}

void Reader::refuse(const std::string& why) const {
  throw CommError("[controller.messages] {} is malformed: {}; use one build of Trireme for all processes",
                  message_, why);
}

std::string_view Reader::bytes(size_t count) {
  if (count > rest_.size()) refuse(fmt::format("{} bytes are missing", count - rest_.size()));
  const std::string_view taken = rest_.substr(0, count);
  rest_.remove_prefix(count);
  return taken;
}

uint64_t Reader::number(size_t bytes) {
  const std::string_view taken = this->bytes(bytes);
  uint64_t value = 0;
  for (size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(taken[i]);
  return value;
}

std::string_view Reader::view(size_t most) {
  const uint32_t size = u32();
  if (size > most) refuse(fmt::format("a text of {} bytes, where {} are allowed", size, most));
  return bytes(size);
}

size_t Reader::count(size_t most, size_t bytes_each) {
  const uint32_t items = u32();
  if (items > most || items * bytes_each > rest_.size()) refuse(fmt::format("a list of {} items", items));
  return items;
}

void Reader::end() const {
  if (!rest_.empty()) refuse(fmt::format("{} bytes follow its end", rest_.size()));
}

void write(Writer& writer, const Challenge& message) {
  writer.text(message.nonce, kMostName);
}
void read(Reader& reader, Challenge& message) {
  message.nonce = reader.text(kMostName);
}

void write(Writer& writer, const Proof& message) {
  writer.text(message.nonce, kMostName);
  writer.text(message.digest, kMostName);
}
void read(Reader& reader, Proof& message) {
  message.nonce = reader.text(kMostName);
  message.digest = reader.text(kMostName);
}

void write(Writer& writer, const Hello& message) {
  writer.u8(static_cast<uint8_t>(message.role));
  writer.text(message.version, kMostName);
  writer.text(message.build, kMostName);
  writer.i64(message.pid);
  writer.text(message.host, kMostName);
  writer.text(message.data_address, kMostName);
  writer.text(message.devices, kMostName);
  writer.i64(message.cores);
  writer.i64(message.wanted_number);
  writer.text(message.rendezvous_address, kMostName);
  writer.i64(message.rendezvous_port);
  writer.u64(message.session);
}
void read(Reader& reader, Hello& message) {
  message.role = role_of(reader);
  message.version = reader.text(kMostName);
  message.build = reader.text(kMostName);
  message.pid = reader.i64();
  message.host = reader.text(kMostName);
  message.data_address = reader.text(kMostName);
  message.devices = reader.text(kMostName);
  message.cores = reader.i64();
  message.wanted_number = reader.i64();
  message.rendezvous_address = reader.text(kMostName);
  message.rendezvous_port = reader.i64();
  message.session = reader.u64();
}

void write(Writer& writer, const Welcome& message) {
  writer.u64(message.session);
  writer.i64(message.number);
  writer.i64(message.count);
}
void read(Reader& reader, Welcome& message) {
  message.session = reader.u64();
  message.number = reader.i64();
  message.count = reader.i64();
}

void write(Writer& writer, const Reject& message) {
  writer.text(message.reason, kMostReason);
}
void read(Reader& reader, Reject& message) {
  message.reason = reader.text(kMostReason);
}

void write(Writer& writer, const World& message) {
  writer.i64(message.size);
  writer.i64(message.rank);
  writer.text(message.address, kMostName);
  writer.i64(message.port);
  writer.text(message.job_key, kMostName);
}
void read(Reader& reader, World& message) {
  message.size = reader.i64();
  message.rank = reader.i64();
  message.address = reader.text(kMostName);
  message.port = reader.i64();
  message.job_key = reader.text(kMostName);
}

void write(Writer& writer, const Session& message) {
  writer.u64(message.session);
  write_list(writer, message.workers, [&](const WorkerInfo& one) { write(writer, one); });
}
void read(Reader& reader, Session& message) {
  message.session = reader.u64();
  read_list(reader, message.workers, kLeastWorkerInfo, [&](WorkerInfo& one) { read(reader, one); });
}

void write(Writer& writer, const SessionBegin& message) {
  writer.u64(message.session);
}
void read(Reader& reader, SessionBegin& message) {
  message.session = reader.u64();
}

void write(Writer& writer, const SessionEnd& message) {
  writer.u64(message.session);
}
void read(Reader& reader, SessionEnd& message) {
  message.session = reader.u64();
}

void write(Writer& writer, const Scope& message) {
  writer.u32(message.id);
  writer.text(message.name, kMostName);
  write_list(writer, message.workers, [&](uint32_t one) { writer.u32(one); });
}
void read(Reader& reader, Scope& message) {
  message.id = reader.u32();
  message.name = reader.text(kMostName);
  read_list(reader, message.workers, sizeof(uint32_t), [&](uint32_t& one) { one = reader.u32(); });
}

void write(Writer& writer, const Instructions& message) {
  writer.u64(message.first);
  writer.u32(message.count);
  writer.text(message.bytes, kMostInstructions);
}
void read(Reader& reader, Instructions& message) {
  message.first = reader.u64();
  message.count = reader.u32();
  message.bytes = reader.text(kMostInstructions);
}

void write(Writer& writer, const Progress& message) {
  writer.u64(message.session);
  writer.u64(message.executed);
  writer.i64(message.worker);
}
void read(Reader& reader, Progress& message) {
  message.session = reader.u64();
  message.executed = reader.u64();
  message.worker = reader.i64();
}

void write(Writer& writer, const Answer& message) {
  writer.u64(message.session);
  writer.u64(message.request);
  writer.i64(message.worker);
  writer.text(message.bytes, kMostAnswer);
}
void read(Reader& reader, Answer& message) {
  message.session = reader.u64();
  message.request = reader.u64();
  message.worker = reader.i64();
  message.bytes = reader.text(kMostAnswer);
}

void write(Writer& writer, const Failed& message) {
  writer.i64(message.worker);
  writer.i64(message.code);
  writer.text(message.text, kMostReason);
}
void read(Reader& reader, Failed& message) {
  message.worker = reader.i64();
  message.code = reader.i64();
  message.text = reader.text(kMostReason);
}

void write(Writer& writer, const RunAction& message) {
  writer.u64(message.request);
  writer.text(message.text, kMostText);
}
void read(Reader& reader, RunAction& message) {
  message.request = reader.u64();
  message.text = reader.text(kMostText);
}

void write(Writer&, const StatusRequest&) {}
void read(Reader&, StatusRequest&) {}

void write(Writer& writer, const Status& message) {
  writer.text(message.version, kMostName);
  writer.text(message.build, kMostName);
  writer.i64(message.pid);
  writer.i64(message.wanted_workers);
  writer.i64(message.uptime_ms);
  writer.u64(message.session);
  writer.u64(message.submitted);
  writer.i64(message.client_pid);
  writer.text(message.client_host, kMostName);
  write_list(writer, message.workers, [&](const WorkerStatus& one) { write(writer, one); });
}
void read(Reader& reader, Status& message) {
  message.version = reader.text(kMostName);
  message.build = reader.text(kMostName);
  message.pid = reader.i64();
  message.wanted_workers = reader.i64();
  message.uptime_ms = reader.i64();
  message.session = reader.u64();
  message.submitted = reader.u64();
  message.client_pid = reader.i64();
  message.client_host = reader.text(kMostName);
  read_list(reader, message.workers, kLeastWorkerStatus, [&](WorkerStatus& one) { read(reader, one); });
}

void write(Writer& writer, const Bye& message) {
  writer.text(message.reason, kMostReason);
}
void read(Reader& reader, Bye& message) {
  message.reason = reader.text(kMostReason);
}

void write(Writer& writer, const Ping& message) {
  writer.u64(message.number);
}
void read(Reader& reader, Ping& message) {
  message.number = reader.u64();
}

void write(Writer& writer, const Pong& message) {
  writer.u64(message.number);
}
void read(Reader& reader, Pong& message) {
  message.number = reader.u64();
}

void write(Writer& writer, const Data& message) {
  writer.u64(message.id);
  writer.u64(message.total);
  writer.u64(message.offset);
  writer.text(message.bytes, kMostChunk);
}
void read(Reader& reader, Data& message) {
  message.id = reader.u64();
  message.total = reader.u64();
  message.offset = reader.u64();
  message.bytes = reader.text(kMostChunk);
}

void write(Writer& writer, const DataDone& message) {
  writer.u64(message.id);
}
void read(Reader& reader, DataDone& message) {
  message.id = reader.u64();
}

void write(Writer& writer, const Take& message) {
  writer.u64(message.id);
  writer.u64(message.timeout_ms);
}
void read(Reader& reader, Take& message) {
  message.id = reader.u64();
  message.timeout_ms = reader.u64();
}

void write(Writer& writer, const Step& message) {
  writer.u32(message.number);
  writer.u8(message.is_last ? 1 : 0);
  writer.text(message.bytes, kMostChunk);
}
void read(Reader& reader, Step& message) {
  message.number = reader.u32();
  const uint8_t last = reader.u8();
  if (last > 1) reader.refuse("a flag is neither 0 nor 1");
  message.is_last = last == 1;
  message.bytes = reader.text(kMostChunk);
}

void write(Writer& writer, const Replay& message) {
  writer.u32(message.number);
  write_list(
      writer, message.arguments, [&](int64_t one) { writer.i64(one); }, kMostArguments);
}
void read(Reader& reader, Replay& message) {
  message.number = reader.u32();
  read_list(
      reader, message.arguments, sizeof(int64_t), [&](int64_t& one) { one = reader.i64(); }, kMostArguments);
}

void write(Writer& writer, const Declaration& message) {
  writer.text(message.text, kMostText);
}
void read(Reader& reader, Declaration& message) {
  message.text = reader.text(kMostText);
}

std::string message_name(uint16_t type) {
  return type < kMessageNames.size() ? kMessageNames[type] : fmt::format("type {}", type);
}

std::string as_reason(std::string_view text) {
  return std::string(text.substr(0, kMostReason));
}

std::string build_id() {
  return hex64(xxh3(fmt::format("{}|{}|{}|{}|{}|{}", kWireVersion, kVersion, kBuildType, kCompiler,
                                kTorchVersion, kHasCuda)));
}

}  // namespace trireme::controller
