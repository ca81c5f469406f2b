#include "trireme/controller/messages.h"

#include <gtest/gtest.h>

#include <random>

namespace trireme::controller {
namespace {

template <typename Message>
Frame framed(const Message& message) {
  return {.type = static_cast<uint16_t>(Message::kType), .body = body_of(message)};
}

WorkerInfo some_worker(int64_t number) {
  return {.number = number,
          .pid = 100 + number,
          .host = "here",
          .data_address = "unix:/run/d",
          .devices = "cuda:1"};
}

/// One of each message, no field of which is empty.
std::vector<Frame> one_of_each() {
  return {framed(Challenge{.nonce = std::string(32, 'n')}),
          framed(Proof{.nonce = std::string(32, 'm'), .digest = std::string(32, 'd')}),
          framed(Hello{Role::kWorker, "0.1", "abc", 7, "here", "unix:/d", "cpu", 2, 3, "127.0.0.1", 4567, 9}),
          framed(Welcome{.session = 5, .number = 2, .count = 8}),
          framed(Reject{.reason = "no"}),
          framed(World{.size = 8, .rank = 3, .address = "127.0.0.1", .port = 99, .job_key = "key"}),
          framed(Session{.session = 6, .workers = {some_worker(0), some_worker(1)}}),
          framed(SessionBegin{.session = 7}),
          framed(SessionEnd{.session = 7}),
          framed(Scope{.id = 4, .name = "pp_stage0", .workers = {0, 1, 5}}),
          framed(Instructions{.first = 1000, .count = 3, .bytes = "opaque"}),
          framed(Progress{.session = 7, .executed = 1 << 20, .worker = 4}),
          framed(Answer{.session = 7, .request = 12, .worker = 1, .bytes = "3.5"}),
          framed(Failed{.worker = 3, .code = 4, .text = "out of memory"}),
          framed(RunAction{.request = 2, .text = "model:\n"}),
          framed(StatusRequest{}),
          framed(Status{"0.1", "abc", 7, 8, 9000, 7, 1234, 88, "here", {{some_worker(2), 4, 5, 6, 7}}}),
          framed(Bye{.reason = "done"}),
          framed(Ping{.number = 1}),
          framed(Pong{.number = 1}),
          framed(Data{.id = 1, .total = 20, .offset = 10, .bytes = "0123456789"}),
          framed(DataDone{.id = 1}),
          framed(Take{.id = 1, .timeout_ms = 500}),
          framed(Step{.number = 3, .is_last = false, .bytes = "opaque"}),
          framed(Replay{.number = 3, .arguments = {-1, 0, int64_t{1} << 62}}),
          framed(Declaration{.text = "dataset path=docs"})};
}

/// Reads the frame as the message that it says it is, and writes that again.
std::string read_and_written(const Frame& frame) {
  switch (static_cast<MessageType>(frame.type)) {
    case MessageType::kChallenge:
      return body_of(message_of<Challenge>(frame));
    case MessageType::kProof:
      return body_of(message_of<Proof>(frame));
    case MessageType::kHello:
      return body_of(message_of<Hello>(frame));
    case MessageType::kWelcome:
      return body_of(message_of<Welcome>(frame));
    case MessageType::kReject:
      return body_of(message_of<Reject>(frame));
    case MessageType::kWorld:
      return body_of(message_of<World>(frame));
    case MessageType::kSession:
      return body_of(message_of<Session>(frame));
    case MessageType::kSessionBegin:
      return body_of(message_of<SessionBegin>(frame));
    case MessageType::kSessionEnd:
      return body_of(message_of<SessionEnd>(frame));
    case MessageType::kScope:
      return body_of(message_of<Scope>(frame));
    case MessageType::kInstructions:
      return body_of(message_of<Instructions>(frame));
    case MessageType::kProgress:
      return body_of(message_of<Progress>(frame));
    case MessageType::kAnswer:
      return body_of(message_of<Answer>(frame));
    case MessageType::kFailed:
      return body_of(message_of<Failed>(frame));
    case MessageType::kRunAction:
      return body_of(message_of<RunAction>(frame));
    case MessageType::kStatusRequest:
      return body_of(message_of<StatusRequest>(frame));
    case MessageType::kStatus:
      return body_of(message_of<Status>(frame));
    case MessageType::kBye:
      return body_of(message_of<Bye>(frame));
    case MessageType::kPing:
      return body_of(message_of<Ping>(frame));
    case MessageType::kPong:
      return body_of(message_of<Pong>(frame));
    case MessageType::kData:
      return body_of(message_of<Data>(frame));
    case MessageType::kDataDone:
      return body_of(message_of<DataDone>(frame));
    case MessageType::kTake:
      return body_of(message_of<Take>(frame));
    case MessageType::kStep:
      return body_of(message_of<Step>(frame));
    case MessageType::kReplay:
      return body_of(message_of<Replay>(frame));
    case MessageType::kDeclaration:
      return body_of(message_of<Declaration>(frame));
  }
  throw CommError("no message");
}

TEST(Messages, ComeBackAsTheyWere) {
  for (const Frame& frame : one_of_each())
    EXPECT_EQ(read_and_written(frame), frame.body) << message_name(frame.type);
  const auto hello = message_of<Hello>(one_of_each()[2]);
  EXPECT_EQ(hello.role, Role::kWorker);
  EXPECT_EQ(hello.rendezvous_port, 4567);
  EXPECT_EQ(hello.session, 9U);
  const auto session = message_of<Session>(one_of_each()[6]);
  EXPECT_EQ(session.workers, (std::vector{some_worker(0), some_worker(1)}));
}

TEST(Messages, ThatAreCutOrTooLongAreRefused) {
  for (const Frame& frame : one_of_each()) {
    for (size_t size = 0; size < frame.body.size(); ++size)
      EXPECT_THROW(read_and_written({frame.type, frame.body.substr(0, size)}), CommError)
          << message_name(frame.type) << " " << size;
    EXPECT_THROW(read_and_written({frame.type, frame.body + "x"}), CommError) << message_name(frame.type);
  }
}

TEST(Messages, OfAnotherTypeAreRefusedByName) {
  try {
    message_of<World>(framed(Ping{.number = 1}));
    FAIL();
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("PING came where WORLD was due"), std::string::npos)
        << error.what();
  }
}

TEST(Messages, TextsAndListsBeyondTheirLimitsAreRefused) {
  EXPECT_THROW(body_of(Reject{.reason = std::string(kMostReason + 1, 'x')}), LogicError);
  Writer long_text;
  long_text.u32(kMostReason + 1);
  EXPECT_THROW(message_of<Reject>({static_cast<uint16_t>(MessageType::kReject),
                                   long_text.take() + std::string(kMostReason + 1, 'x')}),
               CommError);
  Writer long_list;
  long_list.u64(1);
  long_list.u32(0xffffffff);
  EXPECT_THROW(message_of<Session>({static_cast<uint16_t>(MessageType::kSession), long_list.take()}),
               CommError);
  Writer role;
  role.u8(9);
  EXPECT_THROW(message_of<Hello>({static_cast<uint16_t>(MessageType::kHello), role.take()}), CommError);
}

// Every frame whose bytes were changed is read, as something else, or refused by CommError: nothing else
// happens.
TEST(Messages, AreReadOrRefusedWhateverHappensToThem) {
  std::mt19937 random(7);
  const std::vector<Frame> frames = one_of_each();
  int refused = 0;
  constexpr int kMutations = 10'000;
  for (int i = 0; i < kMutations; ++i) {
    Frame frame = frames[random() % frames.size()];
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int change = 0; change < changes && !frame.body.empty(); ++change) {
      const size_t at = random() % frame.body.size();
      const auto byte = static_cast<char>(random());
      switch (random() % 4) {
        case 0:
          frame.body[at] = byte;
          break;
        case 1:
          frame.body.insert(at, 1, byte);
          break;
        case 2:
          frame.body.erase(at, random() % 9);
          break;
        default:
          frame.type = static_cast<uint16_t>(random() % 26);
          break;
      }
    }
    try {
      EXPECT_EQ(read_and_written(frame), frame.body);
    } catch (const CommError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, kMutations / 4);
  EXPECT_LT(refused, kMutations);
}

}  // namespace
}  // namespace trireme::controller
