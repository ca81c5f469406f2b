// Streams of bytes move everything in order, never wait in write() and read(), and say when the other end has
// gone.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/comm/byte_stream.h"

namespace trireme::comm {
namespace {

constexpr auto kSoon = std::chrono::milliseconds(100);

struct Ends {
  std::unique_ptr<ByteStream> writer, reader;
};

Ends ends_of(bool memory) {
  const auto offer = memory ? offer_memory_stream() : offer_socket_stream("127.0.0.1");
  auto writer = memory ? open_memory_stream(offer->text()) : open_socket_stream(offer->text(), 5.0);
  return {std::move(writer), offer->accept(5.0)};
}

std::byte byte_at(size_t place) {
  return static_cast<std::byte>(mix64(7, place));
}

TEST(SocketStreams, ASignalDoesNotEndTheWaitForTheWriter) {
  struct sigaction action {
  }, before{};
  action.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGUSR2, &action, &before), 0);
  const auto offer = offer_socket_stream("127.0.0.1");
  std::atomic<bool> accepted = false;
  std::thread accepting([&] {
    EXPECT_NO_THROW(offer->accept(20.0));
    accepted = true;
  });
  for (int i = 0; i < 10; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ::pthread_kill(accepting.native_handle(), SIGUSR2);
  }
  EXPECT_FALSE(accepted) << "nobody has connected";
  const auto writer = open_socket_stream(offer->text(), 5.0);
  accepting.join();
  ::sigaction(SIGUSR2, &before, nullptr);
}

class Streams : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Comm, Streams, ::testing::Values(true, false),
                         [](const auto& tested) { return tested.param ? "Memory" : "Socket"; });

TEST_P(Streams, MoveEveryByteInPiecesOfAnySize) {
  const Ends ends = ends_of(GetParam());
  constexpr size_t kBytes = 9'000'011;
  std::thread writing([&] {
    std::vector<std::byte> bytes(kBytes);
    for (size_t i = 0; i < kBytes; ++i) bytes[i] = byte_at(i);
    for (size_t done = 0; done < kBytes;) {
      const size_t piece = std::min<size_t>(kBytes - done, 1 + mix64(1, done) % 300'000);
      const size_t count = ends.writer->write({bytes.data() + done, piece});
      if (count == 0) ends.writer->wait(kSoon);
      done += count;
    }
  });
  std::vector<std::byte> got(300'000);
  size_t done = 0, wrong = 0;
  while (done < kBytes) {
    const size_t count = ends.reader->read({got.data(), 1 + mix64(2, done) % 300'000});
    if (count == 0) ends.reader->wait(kSoon);
    for (size_t i = 0; i < count; ++i) wrong += got[i] == byte_at(done + i) ? 0 : 1;
    done += count;
  }
  writing.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(ends.reader->read(got), 0u);
}

TEST_P(Streams, AWriterThatNobodyReadsFromIsNotHeldUp) {
  const Ends ends = ends_of(GetParam());
  const std::vector<std::byte> bytes(1 << 20);
  size_t count = 1, written = 0;
  while (count > 0 && written < (size_t{1} << 30)) written += count = ends.writer->write(bytes);
  EXPECT_EQ(count, 0u) << "after " << written << " bytes";
}

TEST_P(Streams, WhatWasWrittenIsReadBeforeTheReaderHearsOfTheEnd) {
  const Ends ends = ends_of(GetParam());
  const std::vector<std::byte> bytes(1000, std::byte{5});
  ASSERT_EQ(ends.writer->write(bytes), 1000u);
  ends.writer->close();
  std::vector<std::byte> got(2000);
  size_t count = 0;
  while (count < 1000) {
    ends.reader->wait(kSoon);
    count += ends.reader->read({got.data() + count, got.size() - count});
  }
  EXPECT_EQ(count, 1000u);
  EXPECT_THROW(ends.reader->read(got), std::runtime_error);
}

TEST_P(Streams, AWriterHearsThatTheReaderHasGone) {
  Ends ends = ends_of(GetParam());
  ends.reader.reset();
  const std::vector<std::byte> bytes(1000);
  const auto write_on = [&] {
    for (int i = 0; i < 100; ++i) {
      ends.writer->write(bytes);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  EXPECT_THROW(write_on(), std::runtime_error);
}

TEST_P(Streams, ClosingEndsAWait) {
  const Ends ends = ends_of(GetParam());
  std::thread closing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ends.reader->close();
  });
  const auto started = std::chrono::steady_clock::now();
  ends.reader->wait(std::chrono::seconds(10));
  EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(5));
  closing.join();
}

TEST(Streams, AStrangerAtThePortDoesNotBecomeTheWriter) {
  const auto offer = offer_socket_stream("127.0.0.1");
  std::string address, word;
  uint16_t port = 0;
  std::istringstream(offer->text()) >> address >> port >> word;
  EXPECT_GE(word.size(), 32u);
  const int stranger = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::connect(stranger, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
  const std::string guess(word.size(), '0');
  ASSERT_EQ(::send(stranger, guess.data(), guess.size(), 0), static_cast<ssize_t>(guess.size()));

  const auto writer = open_socket_stream(offer->text(), 5.0);
  const auto reader = offer->accept(5.0);
  const std::vector<std::byte> sent(3, std::byte{9});
  ASSERT_EQ(writer->write(sent), 3u);
  std::vector<std::byte> got(3);
  reader->wait(kSoon);
  EXPECT_EQ(reader->read(got), 3u);
  EXPECT_EQ(got, sent);
  ::close(stranger);
}

TEST(Streams, NobodyAtThePortIsSaid) {
  auto offer = offer_socket_stream("127.0.0.1");
  const std::string text = offer->text();
  EXPECT_THROW(offer->accept(0.1), CommError);
  offer.reset();
  EXPECT_THROW(open_socket_stream(text, 1.0), CommError);
}

TEST(Streams, MemoryOfAnotherHostIsNotOpened) {
  EXPECT_EQ(open_memory_stream("another-host 1 3"), nullptr);
  EXPECT_EQ(open_memory_stream(""), nullptr);
}

}  // namespace
}  // namespace trireme::comm
