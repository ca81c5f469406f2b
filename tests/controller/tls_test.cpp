// Handshakes over pairs of sockets: who gets in, and what the others are told.
#include "trireme/controller/tls.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <functional>
#include <thread>

#include "tests/controller/certificates.h"
#include "tests/report/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/controller/messages.h"

namespace trireme::controller {
namespace {

using TlsPointer = std::shared_ptr<const Tls>;

/// Two connected sockets; whichever is not taken stays a plain one.
struct Pair {
  Pair() {
    std::array<int, 2> fds{};
    ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data());
    listens = Descriptor(fds[0]);
    connects = Descriptor(fds[1]);
  }
  Connection listening(const TlsPointer& tls) {
    return {std::move(listens), "the client", [&](int fd) { return tls->accept(fd); }};
  }
  Connection connecting(const TlsPointer& tls, const std::string& host = "node7") {
    return {std::move(connects), "the server", [&](int fd) { return tls->connect(fd, host); }};
  }
  Descriptor listens, connects;
};

TlsPointer with_secret(char letter) {
  return tls_by_secret(std::string(32, letter));
}

std::string tls_refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// A connection on which each side sends a frame and waits for one, with what the two say of it.
struct Meeting {
  Meeting(const TlsPointer& listens, const TlsPointer& connects, const std::string& host = "node7") {
    Pair pair;
    Connection server = pair.listening(listens);
    std::thread serving([&] {
      said_by_server = tls_refusal([&] {
        const Frame frame = server.receive(after_seconds(10));
        server.send(frame.type, frame.body);
        server.flush(after_seconds(10));
      });
      // It stays until the other side has read why.
      tls_refusal([&] { server.receive(after_seconds(10)); });
    });
    said_by_client = tls_refusal([&] {
      Connection client = pair.connecting(connects, host);
      client.establish(after_seconds(10));
      client.send(7, "a frame");
      got_back = client.receive(after_seconds(10)).body == "a frame";
    });
    pair.connects.close();
    serving.join();
  }
  bool got_back = false;
  std::string said_by_server, said_by_client;
};

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks '" << part << "'";
}

TEST(Tls, ASecretThatBothKnowOpensAConnection) {
  const Meeting meeting(with_secret('a'), with_secret('a'));
  EXPECT_TRUE(meeting.got_back);
  EXPECT_EQ(meeting.said_by_server, "");
  EXPECT_EQ(meeting.said_by_client, "");
}

TEST(Tls, DifferentSecretsAreNamedOnBothSides) {
  const Meeting meeting(with_secret('a'), with_secret('b'));
  EXPECT_FALSE(meeting.got_back);
  expect_part(meeting.said_by_server, "different tokens");
  expect_part(meeting.said_by_server, "(from the client)");
  expect_part(meeting.said_by_client, "different tokens");
  expect_part(meeting.said_by_client, "(from the server)");
}

/// Megabytes in both directions at once, with queues that the sockets do not take whole.
TEST(Tls, FramesGoBothWaysAtOnceWhileThreadsReadAndWrite) {
  Pair pair;
  const TlsPointer tls = with_secret('a');
  Connection server = pair.listening(tls), client = pair.connecting(tls);
  std::thread accepting([&] { server.establish(after_seconds(10)); });
  client.establish(after_seconds(10));
  accepting.join();
  constexpr int kFrames = 20;
  const auto body_of_frame = [](int i) {
    return std::string(kMostBodyBytes - 777 * static_cast<size_t>(i), static_cast<char>('a' + i));
  };
  const auto send_all = [&](Connection& to) {
    for (int i = 0; i < kFrames; ++i) {
      to.send(3, body_of_frame(i));
      to.flush(after_seconds(20), 1 << 20);
    }
    to.flush(after_seconds(20));
  };
  const auto receive_all = [&](Connection& from) {
    for (int i = 0; i < kFrames; ++i) {
      EXPECT_TRUE(from.receive(after_seconds(20)).body == body_of_frame(i)) << i;
    }
  };
  std::thread threads[] = {std::thread([&] { send_all(server); }), std::thread([&] { send_all(client); }),
                           std::thread([&] { receive_all(server); }),
                           std::thread([&] { receive_all(client); })};
  for (std::thread& thread : threads) thread.join();
}

/// poll(2) with POLLOUT would return at once, again and again.
TEST(Tls, AHandshakeUnderWayWaitsForBytesThoughFramesAreQueued) {
  Pair pair;
  Connection client = pair.connecting(with_secret('a'));
  client.send(1, "waits");
  EXPECT_GT(client.queued(), 0U);
  EXPECT_EQ(client.events(), POLLIN);
}

TEST(Tls, APeerThatIsSlowOrGoneIsSaidToBe) {
  Pair pair;
  Connection server = pair.listening(with_secret('a'));
  expect_part(tls_refusal([&] { server.establish(after_seconds(0.05)); }),
              "the client did not prove who it is within its time");
  pair.connects.close();
  expect_part(tls_refusal([&] { server.establish(after_seconds(10)); }),
              "the client closed the connection before it had proved who it is");
}

std::string refusal_of_bytes(const std::string& bytes) {
  Pair pair;
  Connection server = pair.listening(with_secret('a'));
  EXPECT_EQ(::send(pair.connects.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  return tls_refusal([&] { server.establish(after_seconds(0.1)); });
}

TEST(Tls, PlainTextIsRefused) {
  for (const std::string& bytes : {frame_bytes(2, 0, "hello"), std::string("GET / HTTP/1.1\r\n\r\n")})
    expect_part(refusal_of_bytes(bytes), "speaks no TLS");
  // A listener that sends plain text first, as one of this host does.
  Pair pair;
  const std::string challenge = frame_bytes(1, 0, std::string(32, 'n'));
  ::send(pair.listens.get(), challenge.data(), challenge.size(), 0);
  Connection client = pair.connecting(with_secret('a'));
  expect_part(tls_refusal([&] { client.establish(after_seconds(10)); }), "speaks no TLS");
}

/// The header of a record that says 16 KiB, and many bytes of it.
TEST(Tls, StrangersMaySendAKibibyte) {
  const std::string header("\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb", 9);
  expect_part(refusal_of_bytes(header + std::string(kMostHandshakeBytes - 10, 'x')), "within its time");
  expect_part(refusal_of_bytes(header + std::string(kMostHandshakeBytes + 1, 'x')), "too many bytes");
}

TEST(Tls, OlderVersionsAreRefused) {
  Pair pair;
  Connection server = pair.listening(with_secret('a'));
  std::string said;
  std::thread old([&] { said = test::refusal_of_old_tls(pair.connects.get()); });
  expect_part(tls_refusal([&] { server.establish(after_seconds(10)); }), "no TLS 1.3");
  old.join();
  expect_part(said, "protocol version");
}

/// The bytes with which a client begins.
std::string first_flight() {
  Pair pair;
  Connection client = pair.connecting(with_secret('a'));
  client.read_some();
  std::string bytes(kMostHandshakeBytes, '\0');
  bytes.resize(static_cast<size_t>(::recv(pair.listens.get(), bytes.data(), bytes.size(), 0)));
  return bytes;
}

TEST(Tls, AHandshakeThatIsCutAnywhereEndsTheConnection) {
  const std::string flight = first_flight();
  ASSERT_GT(flight.size(), 100U);
  for (size_t size = 0; size < flight.size(); ++size) {
    Pair pair;
    Connection server = pair.listening(with_secret('a'));
    ::send(pair.connects.get(), flight.data(), size, 0);
    pair.connects.close();
    expect_part(tls_refusal([&] { server.establish(after_seconds(10)); }), "closed the connection");
  }
}

TEST(Tls, AHandshakeWithAChangedBitOpensNothing) {
  const std::string flight = first_flight();
  for (size_t bit = 0; bit < 8 * flight.size(); bit += 5) {
    std::string changed = flight;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
    Pair pair;
    Connection server = pair.listening(with_secret('a'));
    ::send(pair.connects.get(), changed.data(), changed.size(), 0);
    pair.connects.close();
    EXPECT_NE(tls_refusal([&] { server.establish(after_seconds(10)); }), "") << bit;
  }
}

/// Passes what is there from one socket to the other one, changed by `change`.
void pass(int from, int to, const std::function<void(std::string&)>& change = {}) {
  std::string bytes(1 << 16, '\0');
  const ssize_t got = ::recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got <= 0) return;
  bytes.resize(static_cast<size_t>(got));
  if (change) change(bytes);
  ::send(to, bytes.data(), bytes.size(), 0);
}

/// A client and a server with somebody between them, after their handshake.
struct Intercepted {
  Intercepted() {
    for (int i = 0; i < 10; ++i) {
      client.read_some();
      pass(near.listens.get(), far.connects.get());
      server.read_some();
      pass(far.connects.get(), near.listens.get());
    }
  }
  Pair near, far;
  Connection client = near.connecting(with_secret('a')), server = far.listening(with_secret('a'));
};

TEST(Tls, AFrameWithAChangedBitOrThatIsRepeatedIsRefused) {
  const std::function<void(std::string&)> changes[] = {
      [](std::string& bytes) { bytes.back() = static_cast<char>(bytes.back() ^ 1); },
      [](std::string& bytes) { bytes[30] = static_cast<char>(bytes[30] ^ 0x10); },
      [](std::string& bytes) { bytes += bytes; }};
  for (const auto& change : changes) {
    Intercepted between;
    between.client.send(5, "some bytes of a body");
    pass(between.near.listens.get(), between.far.connects.get(), change);
    expect_part(tls_refusal([&] {
                  between.server.receive(after_seconds(10));
                  between.server.receive(after_seconds(10));
                }),
                "TLS gives the connection up");
  }
}

TEST(Tls, AFrameThatIsCutIsALostConnection) {
  Intercepted between;
  between.client.send(5, std::string(5000, 'x'));
  pass(between.near.listens.get(), between.far.connects.get(),
       [](std::string& bytes) { bytes.resize(2000); });
  between.far.connects.close();
  expect_part(tls_refusal([&] { between.server.receive(after_seconds(10)); }), "closed the connection");
}

/// The bytes that somebody sees who listens in.
TEST(Tls, NoByteOfAFrameIsPlain) {
  Intercepted between;
  between.client.send(5, "a text that nobody else should read");
  pass(between.near.listens.get(), between.far.connects.get(), [](const std::string& bytes) {
    EXPECT_GT(bytes.size(), 40U);
    EXPECT_EQ(bytes.find("text"), std::string::npos);
    EXPECT_EQ(bytes.find("TRCF"), std::string::npos);
  });
  EXPECT_EQ(between.server.receive(after_seconds(10)).body, "a text that nobody else should read");
}

struct Certificates : testing::Test {
  TemporaryFolder folder;
  test::Authority ours{folder.path(), "ours"}, theirs{folder.path(), "theirs"};
};

TEST_F(Certificates, OfOneAuthorityOpenAConnection) {
  for (const char* host : {"node7", "10.0.0.7"}) {
    const Meeting meeting(tls_by_certificates(ours.issue(host)), tls_by_certificates(ours.issue("laptop")),
                          host);
    EXPECT_TRUE(meeting.got_back);
    EXPECT_EQ(meeting.said_by_server, "");
    EXPECT_EQ(meeting.said_by_client, "");
  }
}

TEST_F(Certificates, OfAnotherAuthorityAreRefusedOnEitherSide) {
  const TlsPointer own = tls_by_certificates(ours.issue("node7"));
  CertificateFiles files = theirs.issue("node7");
  const Meeting strange_server(tls_by_certificates(files), own);
  expect_part(strange_server.said_by_client, "the peer's certificate is refused: unable to get local issuer");
  expect_part(strange_server.said_by_server, "the peer refuses this side's certificate");
  files.authority = ours.issue("node7").authority;  // it trusts the server, which does not trust it
  const Meeting strange_client(own, tls_by_certificates(files));
  expect_part(strange_client.said_by_server, "the peer's certificate is refused: unable to get local issuer");
  expect_part(strange_client.said_by_client, "the peer refuses this side's certificate");
  EXPECT_FALSE(strange_client.got_back);
}

TEST_F(Certificates, ThatExpireWhileTheProcessRunsAreRefused) {
  const std::string refusal = tls_refusal([&] { tls_by_certificates(ours.issue("node7", 0)); });
  expect_part(refusal, "is not valid today");
  // A peer that does not look at its own.
  Pair pair;
  Connection server = pair.listening(tls_by_certificates(ours.issue("node7")));
  const CertificateFiles files = ours.issue("laptop", 0);
  std::string said;
  std::thread expired([&] { said = test::refusal_with_certificate(pair.connects.get(), files); });
  expect_part(tls_refusal([&] { server.establish(after_seconds(10)); }), "certificate has expired");
  server.shut_down();
  expired.join();
  expect_part(said, "certificate expired");
}

TEST_F(Certificates, ArePartOfEveryConnection) {
  Pair pair;
  Connection server = pair.listening(tls_by_certificates(ours.issue("node7")));
  std::string said;
  std::thread bare([&] { said = test::refusal_with_certificate(pair.connects.get(), {}); });
  expect_part(tls_refusal([&] { server.establish(after_seconds(10)); }), "showed no certificate");
  server.shut_down();
  bare.join();
  expect_part(said, "certificate required");
}

TEST_F(Certificates, ForAnotherHostAreRefused) {
  const Meeting meeting(tls_by_certificates(ours.issue("node8")), tls_by_certificates(ours.issue("laptop")));
  expect_part(meeting.said_by_client, "hostname mismatch");
  expect_part(meeting.said_by_client, "--host");
}

TEST_F(Certificates, AndSecretsDoNotMeet) {
  const TlsPointer certificate = tls_by_certificates(ours.issue("node7"));
  const Meeting to_secret(with_secret('a'), certificate), to_certificate(certificate, with_secret('a'));
  for (const Meeting* const meeting : {&to_secret, &to_certificate}) {
    EXPECT_FALSE(meeting->got_back);
    expect_part(meeting->said_by_client, "by a token, the other one by certificates");
  }
}

TEST_F(Certificates, WhoseFilesDoNotFitAreRefusedByName) {
  const CertificateFiles good = ours.issue("node7"), other = ours.issue("node7");
  CertificateFiles files = good;
  files.key = other.key;
  expect_part(tls_refusal([&] { tls_by_certificates(files); }), "cannot be used with the certificate");
  files = good;
  files.certificate = folder.file("none.pem");
  expect_part(tls_refusal([&] { tls_by_certificates(files); }), "none.pem cannot be used");
  files = good;
  files.authority = good.key;
  expect_part(tls_refusal([&] { tls_by_certificates(files); }), "the authority");
  files = good;
  files.key = folder.file("none.key");
  expect_part(tls_refusal([&] { tls_by_certificates(files); }), "cannot be read");
  ::chmod(good.key.c_str(), 0640);
  expect_part(tls_refusal([&] { tls_by_certificates(good); }), "can be read by other users (mode 640)");
}

}  // namespace
}  // namespace trireme::controller
