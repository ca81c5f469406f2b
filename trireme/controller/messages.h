#pragma once
// Messages between the processes of a controller, as structs, and their way into bodies of frames and
// back. A body that is shorter, longer or larger than its message may be is refused; nothing is allocated
// beyond what has arrived.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/controller/wire.h"

namespace trireme::controller {

/// Numbers of the types on the wire; new ones go to the end.
enum class MessageType : uint16_t {
  kChallenge = 1,
  kProof,
  kHello,
  kWelcome,
  kReject,
  kWorld,
  kSession,
  kSessionBegin,
  kSessionEnd,
  kScope,
  kInstructions,
  kProgress,
  kAnswer,
  kFailed,
  kRunAction,
  kStatusRequest,
  kStatus,
  kBye,
  kPing,
  kPong,
  kData,
  kDataDone,
  kTake,
  kStep,
  kReplay,
  kDeclaration
};

enum class Role : uint8_t { kClient = 1, kWorker, kObserver };
/// "client", "worker" or "observer".
const char* role_name(Role role);

inline constexpr size_t kMostName = 256;        ///< bytes of a host, a version or a name
inline constexpr size_t kMostReason = 8 << 10;  ///< bytes of a text for people
inline constexpr size_t kMostAnswer = 64 << 10;
inline constexpr size_t kMostText = kMostBodyBytes - 64;
inline constexpr size_t kMostInstructions = kMostBodyBytes - 64;
inline constexpr size_t kMostChunk = kMostBodyBytes - 64;
inline constexpr size_t kMostArguments = 1 << 16;  ///< of a replay
inline constexpr size_t kMostWorkers = 1024;
/// Instructions that a client may be ahead of the slowest worker.
inline constexpr uint64_t kMostAhead = 65'536;

/// Writes numbers, little-endian, and texts behind their lengths.
class Writer {
 public:
  void number(uint64_t value, size_t bytes);
  void u8(uint8_t value) { number(value, 1); }
  void u32(uint32_t value) { number(value, 4); }
  void u64(uint64_t value) { number(value, 8); }
  void i64(int64_t value) { number(static_cast<uint64_t>(value), 8); }
  /// Throws LogicError for a text of more than `most` bytes.
  void text(std::string_view text, size_t most);
  void reserve(size_t bytes) { bytes_.reserve(bytes); }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Reads what Writer has written; throws CommError for anything else.
class Reader {
 public:
  Reader(std::string_view bytes, const char* message) : rest_(bytes), message_(message) {}
  uint64_t number(size_t bytes);
  uint8_t u8() { return static_cast<uint8_t>(number(1)); }
  uint32_t u32() { return static_cast<uint32_t>(number(4)); }
  uint64_t u64() { return number(8); }
  int64_t i64() { return static_cast<int64_t>(number(8)); }
  std::string text(size_t most) { return std::string(view(most)); }
  /// A text in place; it lives as long as what is read.
  std::string_view view(size_t most);
  /// A number of items of `bytes_each` bytes or more; no more than the rest can hold.
  size_t count(size_t most, size_t bytes_each);
  /// Nothing may be left.
  void end() const;
  [[noreturn]] void refuse(const std::string& why) const;

 private:
  std::string_view bytes(size_t count);

  std::string_view rest_;
  const char* message_;
};

/// Begins the proof that a client of a TCP port knows its token.
struct Challenge {
  static constexpr MessageType kType = MessageType::kChallenge;
  std::string nonce;
};
/// Answers a challenge: from the one who connected with a nonce of its own, from the one who listens without.
struct Proof {
  static constexpr MessageType kType = MessageType::kProof;
  std::string nonce, digest;
};

struct Hello {
  static constexpr MessageType kType = MessageType::kHello;
  Role role = Role::kObserver;
  std::string version = {}, build = {};  ///< build_id() of the sender
  int64_t pid = 0;
  std::string host = {};
  std::string data_address = {};  ///< a worker's, for bulk bytes
  std::string devices = {};       ///< a worker's, for people: "cuda:0" or "cpu"
  int64_t cores = 0;
  int64_t wanted_number = -1;           ///< of a worker; -1: any
  std::string rendezvous_address = {};  ///< where a worker listens for its peers
  int64_t rendezvous_port = 0;
  uint64_t session = 0;  ///< on a data connection: that of the client
};

struct Welcome {
  static constexpr MessageType kType = MessageType::kWelcome;
  uint64_t session = 0;
  int64_t number = -1;  ///< of a worker
  int64_t count = 0;    ///< of all workers
};

struct Reject {
  static constexpr MessageType kType = MessageType::kReject;
  std::string reason;
};

/// All workers are there: where they meet.
struct World {
  static constexpr MessageType kType = MessageType::kWorld;
  int64_t size = 0, rank = 0;
  std::string address;
  int64_t port = 0;
  std::string job_key;
};

struct WorkerInfo {
  int64_t number = 0, pid = 0;
  std::string host, data_address, devices;
  bool operator==(const WorkerInfo&) const = default;
};

/// All workers, to the client.
struct Session {
  static constexpr MessageType kType = MessageType::kSession;
  uint64_t session = 0;
  std::vector<WorkerInfo> workers;
};

/// A client is there, to workers. Its instructions are numbered from 0.
struct SessionBegin {
  static constexpr MessageType kType = MessageType::kSessionBegin;
  uint64_t session = 0;
};
/// The client has gone, to workers: its tensors are free.
struct SessionEnd {
  static constexpr MessageType kType = MessageType::kSessionEnd;
  uint64_t session = 0;
};

struct Scope {
  static constexpr MessageType kType = MessageType::kScope;
  uint32_t id = 0;
  std::string name;
  std::vector<uint32_t> workers;
};

struct Instructions {
  static constexpr MessageType kType = MessageType::kInstructions;
  uint64_t first = 0;
  uint32_t count = 0;
  std::string bytes;
};

/// How many instructions of a session have been executed: by a worker, or by the slowest of all.
struct Progress {
  static constexpr MessageType kType = MessageType::kProgress;
  uint64_t session = 0, executed = 0;
  int64_t worker = -1;
};

/// A small fetched value.
struct Answer {
  static constexpr MessageType kType = MessageType::kAnswer;
  uint64_t session = 0, request = 0;
  int64_t worker = -1;
  std::string bytes;
};

/// A worker ends, or has ended; `worker` -1: the dispatcher itself.
struct Failed {
  static constexpr MessageType kType = MessageType::kFailed;
  int64_t worker = -1, code = 0;
  std::string text;
};

/// An action that all workers take together for a run that the client drives (run_host.h); worker 0 answers
/// the request. It counts as an instruction.
struct RunAction {
  static constexpr MessageType kType = MessageType::kRunAction;
  uint64_t request = 0;
  std::string text;
};

/// A piece of a recorded step (plan/step_recording.h), which replays name by its number. One that had the
/// number before is forgotten.
struct Step {
  static constexpr MessageType kType = MessageType::kStep;
  uint32_t number = 0;
  bool is_last = true;
  std::string bytes;
};

/// A recorded step is made with these arguments. It counts as an instruction.
struct Replay {
  static constexpr MessageType kType = MessageType::kReplay;
  uint32_t number = 0;
  std::vector<int64_t> arguments;
};

/// The part of a program that workers alone read before instructions that need it: a dataset
/// (plan/dataset_spec.h).
struct Declaration {
  static constexpr MessageType kType = MessageType::kDeclaration;
  std::string text;
};

struct StatusRequest {
  static constexpr MessageType kType = MessageType::kStatusRequest;
};

struct WorkerStatus {
  WorkerInfo worker;
  int64_t cores = 0;
  uint64_t executed = 0, queued_bytes = 0;
  int64_t last_seen_ms = 0;
};

struct Status {
  static constexpr MessageType kType = MessageType::kStatus;
  std::string version, build;
  int64_t pid = 0, wanted_workers = 0, uptime_ms = 0;
  uint64_t session = 0, submitted = 0;
  int64_t client_pid = 0;  ///< 0: none
  std::string client_host;
  std::vector<WorkerStatus> workers;
};

/// The sender leaves in order. From the dispatcher to workers: end.
struct Bye {
  static constexpr MessageType kType = MessageType::kBye;
  std::string reason;
};

struct Ping {
  static constexpr MessageType kType = MessageType::kPing;
  uint64_t number = 0;
};
struct Pong {
  static constexpr MessageType kType = MessageType::kPong;
  uint64_t number = 0;
};

/// A piece of bulk bytes on a direct connection.
struct Data {
  static constexpr MessageType kType = MessageType::kData;
  uint64_t id = 0, total = 0, offset = 0;
  std::string bytes;
};
/// All pieces have arrived.
struct DataDone {
  static constexpr MessageType kType = MessageType::kDataDone;
  uint64_t id = 0;
};
/// Asks for bulk bytes, which the worker may still have to make.
struct Take {
  static constexpr MessageType kType = MessageType::kTake;
  uint64_t id = 0, timeout_ms = 0;
};

void write(Writer& writer, const Challenge& message);
void write(Writer& writer, const Proof& message);
void write(Writer& writer, const Hello& message);
void write(Writer& writer, const Welcome& message);
void write(Writer& writer, const Reject& message);
void write(Writer& writer, const World& message);
void write(Writer& writer, const Session& message);
void write(Writer& writer, const SessionBegin& message);
void write(Writer& writer, const SessionEnd& message);
void write(Writer& writer, const Scope& message);
void write(Writer& writer, const Instructions& message);
void write(Writer& writer, const Progress& message);
void write(Writer& writer, const Answer& message);
void write(Writer& writer, const Failed& message);
void write(Writer& writer, const RunAction& message);
void write(Writer& writer, const StatusRequest& message);
void write(Writer& writer, const Status& message);
void write(Writer& writer, const Bye& message);
void write(Writer& writer, const Ping& message);
void write(Writer& writer, const Pong& message);
void write(Writer& writer, const Data& message);
void write(Writer& writer, const DataDone& message);
void write(Writer& writer, const Take& message);
void write(Writer& writer, const Step& message);
void write(Writer& writer, const Replay& message);
void write(Writer& writer, const Declaration& message);

void read(Reader& reader, Challenge& message);
void read(Reader& reader, Proof& message);
void read(Reader& reader, Hello& message);
void read(Reader& reader, Welcome& message);
void read(Reader& reader, Reject& message);
void read(Reader& reader, World& message);
void read(Reader& reader, Session& message);
void read(Reader& reader, SessionBegin& message);
void read(Reader& reader, SessionEnd& message);
void read(Reader& reader, Scope& message);
void read(Reader& reader, Instructions& message);
void read(Reader& reader, Progress& message);
void read(Reader& reader, Answer& message);
void read(Reader& reader, Failed& message);
void read(Reader& reader, RunAction& message);
void read(Reader& reader, StatusRequest& message);
void read(Reader& reader, Status& message);
void read(Reader& reader, Bye& message);
void read(Reader& reader, Ping& message);
void read(Reader& reader, Pong& message);
void read(Reader& reader, Data& message);
void read(Reader& reader, DataDone& message);
void read(Reader& reader, Take& message);
void read(Reader& reader, Step& message);
void read(Reader& reader, Replay& message);
void read(Reader& reader, Declaration& message);

/// "HELLO"; "type 99" for a number that is none.
std::string message_name(uint16_t type);

/// `text` without what does not fit into a reason.
std::string as_reason(std::string_view text);

/// Tells builds apart whose processes may not work together: version, compiler and libraries.
std::string build_id();

/// The body of `message`.
template <typename Message>
std::string body_of(const Message& message) {
  Writer writer;
  write(writer, message);
  return writer.take();
}

/// Queues `message`; throws as Connection::send().
template <typename Message>
void send(Connection& connection, const Message& message) {
  connection.send(static_cast<uint16_t>(Message::kType), body_of(message));
}

template <typename Message>
bool is(const Frame& frame) {
  return frame.type == static_cast<uint16_t>(Message::kType);
}

/// The message of `frame`. Throws CommError when it is another one, or none.
template <typename Message>
Message message_of(const Frame& frame) {
  if (!is<Message>(frame)) {
    throw CommError(
        "[controller.messages] {} came where {} was due; use one build of Trireme for all processes",
        message_name(frame.type), message_name(static_cast<uint16_t>(Message::kType)));
  }
  const std::string name = message_name(frame.type);
  Reader reader(frame.body, name.c_str());
  Message message;
  read(reader, message);
  reader.end();
  return message;
}

}  // namespace trireme::controller
