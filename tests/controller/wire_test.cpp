#include "trireme/controller/wire.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>

#include "trireme/base/error.h"

namespace trireme::controller {
namespace {

struct SocketPair {
  SocketPair() {
    int fds[2];
    ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds);
    here = Descriptor(fds[0]);
    there = Descriptor(fds[1]);
  }
  Descriptor here, there;
};

std::string three_frames() {
  return frame_bytes(1, 0, "one") + frame_bytes(2, 1, "") + frame_bytes(3, 2, std::string(5000, 'x'));
}

std::string refusal_of(const std::string& bytes, size_t most_body = kMostBodyBytes) {
  FrameReader reader;
  reader.set_most_body(most_body);
  reader.feed(bytes);
  try {
    while (reader.next()) {
    }
  } catch (const CommError& error) {
    EXPECT_THROW(reader.next(), CommError);
    return error.what();
  }
  return "";
}

TEST(FrameReader, FindsTheSameFramesHoweverTheBytesArrive) {
  const std::string bytes = three_frames();
  for (size_t piece = 1; piece <= bytes.size(); piece += piece < 100 ? 1 : 613) {
    FrameReader reader;
    std::vector<std::pair<int, size_t>> found;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      reader.feed(std::string_view(bytes).substr(at, piece));
      while (const auto frame = reader.next()) found.emplace_back(frame->type, frame->body.size());
    }
    EXPECT_EQ(found, (std::vector<std::pair<int, size_t>>{{1, 3}, {2, 0}, {3, 5000}})) << piece;
  }
}

TEST(FrameReader, ReadsALongBodyInPlace) {
  const std::string bytes = frame_bytes(4, 0, std::string(100'000, 'y'));
  FrameReader reader;
  reader.feed(std::string_view(bytes).substr(0, 1000));
  EXPECT_FALSE(reader.next());
  const auto space = reader.body_space();
  ASSERT_EQ(space.size(), bytes.size() - 1000);
  bytes.copy(space.data(), space.size(), 1000);
  reader.took(space.size());
  EXPECT_EQ(reader.next()->body, std::string(100'000, 'y'));
}

TEST(FrameReader, RefusesWhatIsNoFrame) {
  EXPECT_NE(refusal_of("GET / HTTP/1.1\r\nHost: x\r\n\r\n").find("no frames of Trireme"), std::string::npos);
  std::string version = three_frames();
  version[4] = 9;
  EXPECT_NE(refusal_of(version).find("version 9 of the protocol, this process version 2"), std::string::npos);
  EXPECT_NE(refusal_of(three_frames(), 4999).find("5000 bytes, 4999 are allowed"), std::string::npos);
  EXPECT_EQ(refusal_of(three_frames(), 5000), "");
  const std::string again = frame_bytes(1, 0, "one");
  EXPECT_NE(refusal_of(again + again).find("lost or sent twice"), std::string::npos);
  EXPECT_THROW(frame_bytes(1, 0, std::string(kMostBodyBytes + 1, 'x')), LogicError);
}

TEST(FrameReader, SeesEveryChangedBit) {
  const std::string bytes = frame_bytes(7, 0, "some bytes of a body");
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string changed = bytes;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
    FrameReader reader;
    reader.feed(changed);
    // A body that seems to be longer is waited for; it never passes for a frame.
    try {
      EXPECT_FALSE(reader.next()) << bit;
    } catch (const CommError&) {
    }
  }
}

TEST(Connection, CarriesFramesBothWays) {
  SocketPair pair;
  Connection here(std::move(pair.here), "there"), there(std::move(pair.there), "here");
  const std::string large(kMostBodyBytes, 'z');
  std::thread echo([&] {
    for (int i = 0; i < 5; ++i) {
      const Frame frame = there.receive(after_seconds(10));
      there.send(frame.type, frame.body);
      there.flush(after_seconds(10));
    }
  });
  for (uint16_t i = 0; i < 5; ++i) {
    here.send(i, large);
    here.flush(after_seconds(10));
    const Frame frame = here.receive(after_seconds(10));
    EXPECT_EQ(frame.type, i);
    EXPECT_TRUE(frame.body == large);
  }
  echo.join();
}

TEST(Connection, SaysWhoIsSilentWhoIsGoneAndWhoReadsTooSlowly) {
  SocketPair pair;
  Connection here(std::move(pair.here), "worker 3");
  const auto said = [](const auto& body) {
    try {
      body();
    } catch (const CommError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(said([&] { here.receive(after_seconds(0.01)); }).find("worker 3 sent nothing"),
            std::string::npos);
  here.set_most_queued(1 << 20);
  const std::string slow = said([&] {
    for (int i = 0; i < 1000; ++i) here.send(1, std::string(10'000, 'x'));
  });
  EXPECT_NE(slow.find("worker 3 reads too slowly"), std::string::npos) << slow;
  EXPECT_LE(here.queued(), (1U << 20) + 20'000);
  EXPECT_NE(said([&] { here.flush(after_seconds(0.01)); }).find("worker 3 did not read"), std::string::npos);
  pair.there.close();
  EXPECT_NE(said([&] { here.receive(after_seconds(1)); }).find("worker 3 closed"), std::string::npos);
  EXPECT_NE(said([&] { here.flush(after_seconds(1)); }).find("worker 3 closed"), std::string::npos);
}

}  // namespace
}  // namespace trireme::controller
