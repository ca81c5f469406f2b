#include "trireme/controller/address.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/report/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/controller/messages.h"

namespace trireme::controller {
namespace {

std::string said_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// An environment whose sockets and tokens lie in a folder of the test.
struct Place {
  Place() : environment({{"XDG_RUNTIME_DIR", folder.path()}}) {}
  TemporaryFolder folder;
  Environment environment;
};

/// The listening side for one connection: its frames after the proof, or what was wrong.
struct Doorkeeper {
  Doorkeeper(const Listener& listener, const std::string& token)
      : thread([this, &listener, token] { error = said_by([&] { keep(listener, token); }); }) {}

  void keep(const Listener& listener, const std::string& token) {
    ASSERT_TRUE(wait_for(listener.fd(), POLLIN, after_seconds(10)));
    Connection connection = listener.accept("a stranger").value();
    connection.set_most_body(kMostBytesOfStrangers);
    Gate gate(token);
    gate.greet(connection);
    while (!gate.open()) gate.take(connection, connection.receive(after_seconds(10)));
    first = connection.receive(after_seconds(10));
    connection.flush(after_seconds(10));
  }

  std::string error;
  Frame first;
  std::thread thread;
};

TEST(Address, ReadsWhatItWrites) {
  for (const char* text :
       {"unix:/run/x/y.sock", "tcp:127.0.0.1:12345", "tcp:node7:1", "tcp:10.0.0.1:2", "tcp:[fd00::2]:3"})
    EXPECT_EQ(parse_address(text).text(), text);
  EXPECT_EQ(parse_address("tcp:localhost:80").port, 80);
  EXPECT_FALSE(parse_address("tcp:localhost:80").is_beyond());
  EXPECT_TRUE(parse_address("tcp:node7:1").is_beyond());
}

TEST(Address, RefusesWhatIsNoneAndWhatStandsForAllAddresses) {
  for (const char* text : {"", "12345", "unix:", "tcp:", "tcp:127.0.0.1:", "tcp:127.0.0.1:x",
                           "tcp:127.0.0.1:70000", "tcp:127.0.0.1:-1", "http://x", "tcp:a b:1", "tcp::1"})
    EXPECT_THROW(parse_address(text), ConfigError) << text;
  for (const char* text : {"tcp:0.0.0.0:1", "tcp:[::]:1", "tcp:[0:0::0]:1"})
    EXPECT_NE(said_by([&] { parse_address(text); }).find("every address"), std::string::npos) << text;
}

TEST(Address, FoldersThatOthersMayEnterAreRefused) {
  const Place place;
  const std::string folder = runtime_folder(place.environment);
  EXPECT_EQ(folder, place.folder.path() + "/trireme");
  struct stat status {};
  ::stat(folder.c_str(), &status);
  EXPECT_EQ(status.st_mode & 07777, 0700U);
  ::chmod(folder.c_str(), 0755);
  EXPECT_NE(said_by([&] { runtime_folder(place.environment); }).find("chmod 700"), std::string::npos);
  ::chmod(folder.c_str(), 0700);
  ::mkdir(place.folder.file("open").c_str(), 0755);
  ::chmod(place.folder.file("open").c_str(), 0755);
  EXPECT_THROW(Listener(Address{.path = place.folder.file("open/s")}, place.environment), EnvironmentError);
  std::filesystem::create_directory_symlink(folder, place.folder.file("link"));
  EXPECT_THROW(Listener(Address{.path = place.folder.file("link/s")}, place.environment), EnvironmentError);
}

TEST(Address, AUnixSocketIsTakenOverFromTheDeadAndNotFromTheLiving) {
  const Place place;
  const Address address{.path = place.folder.file("own/s")};
  {
    const Listener first(address, place.environment);
    EXPECT_NE(said_by([&] { Listener(address, place.environment); }).find("may be running"),
              std::string::npos);
    std::filesystem::rename(address.path, place.folder.file("own/dead"));
  }
  std::filesystem::rename(place.folder.file("own/dead"), address.path);
  { const Listener second(address, place.environment); }
  EXPECT_FALSE(std::filesystem::exists(address.path));
}

/// Sockets that programs made for themselves go; those that somebody named stay, and so do files.
TEST(Address, SocketsOfKilledProgramsAreRemovedByTheNextOne) {
  const Place place;
  const auto path = [&](const std::string& name) { return place.folder.file("own/" + name); };
  const std::vector<std::string> made = {"session-77-1", "train-78", "data-81-0a1b"},
                                 kept = {"session-79-1~", "session-x", "mine", "train-"};
  const Listener living(Address{.path = path("session-1-1")}, place.environment);
  for (const auto* names : {&made, &kept}) {
    for (const std::string& name : *names) {
      {
        const Listener killed(Address{.path = path("killed")}, place.environment);
        std::filesystem::rename(path("killed"), path(name));
      }
      ASSERT_TRUE(std::filesystem::exists(path(name))) << name;
    }
  }
  write_file_atomic(path("train-80"), "no socket");
  const Listener next(Address{.path = path("session-2-1")}, place.environment);
  for (const std::string& name : made) EXPECT_FALSE(std::filesystem::exists(path(name))) << name;
  for (const std::string& name : kept) EXPECT_TRUE(std::filesystem::exists(path(name))) << name;
  for (const char* name : {"train-80", "session-1-1", "session-2-1"})
    EXPECT_TRUE(std::filesystem::exists(path(name))) << name;
}

TEST(Address, AConnectionWorksOverBothKinds) {
  const Place place;
  for (const Address& address : {Address{.path = place.folder.file("own/s")}, Address{}}) {
    const Listener listener(address, place.environment);
    Doorkeeper keeper(listener, listener.token());
    Connection client = connect_to(listener.address(), place.environment, "the server", after_seconds(10));
    send(client, Ping{.number = 77});
    keeper.thread.join();
    EXPECT_EQ(keeper.error, "");
    EXPECT_EQ(message_of<Ping>(keeper.first).number, 77U);
  }
}

TEST(Address, NoServerIsSaidWithTheCommandThatStartsOne) {
  const Place place;
  for (const Address& address : {Address{.path = place.folder.file("none")}, Address{.port = 1}}) {
    const std::string said =
        said_by([&] { connect_to(address, place.environment, "a server", after_seconds(1)); });
    EXPECT_NE(said.find("trireme serve -n WORKERS"), std::string::npos) << said;
  }
}

TEST(Address, AWrongTokenIsRefusedOnBothSides) {
  const Place place;
  const Listener listener({}, place.environment);
  {
    Doorkeeper keeper(listener, std::string(32, 'w'));
    const std::string said =
        said_by([&] { connect_to(listener.address(), place.environment, "the server", after_seconds(10)); });
    keeper.thread.join();
    EXPECT_NE(keeper.error.find("token of this connection is wrong"), std::string::npos) << keeper.error;
    EXPECT_NE(said, "");
  }
  // A listener that answers anything without the token.
  std::thread impostor([&] {
    wait_for(listener.fd(), POLLIN, after_seconds(10));
    Connection connection = listener.accept("a client").value();
    send(connection, Challenge{.nonce = std::string(32, 'n')});
    const auto proof = message_of<Proof>(connection.receive(after_seconds(10)));
    send(connection, Proof{.nonce = {}, .digest = proof.digest});
    connection.flush(after_seconds(10));
  });
  const std::string said =
      said_by([&] { connect_to(listener.address(), place.environment, "the server", after_seconds(10)); });
  impostor.join();
  EXPECT_NE(said.find("does not know the token"), std::string::npos) << said;
}

/// Connects as anybody can.
Descriptor raw_connection(int64_t port) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(port));
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name), 0);
  return socket;
}

TEST(Address, AProofThatWasRecordedIsWorthNothingLater) {
  const Place place;
  const Listener listener({}, place.environment);
  std::string recorded;
  std::thread listens([&] {
    wait_for(listener.fd(), POLLIN, after_seconds(10));
    Connection victim = listener.accept("a client").value();
    Gate gate(listener.token());
    gate.greet(victim);
    const Frame proof = victim.receive(after_seconds(10));
    recorded = proof.body;
    gate.take(victim, proof);  // it is good here
    EXPECT_TRUE(gate.open());
  });
  connect_to(listener.address(), place.environment, "the server", after_seconds(10));
  listens.join();
  Doorkeeper keeper(listener, listener.token());
  Connection thief(raw_connection(listener.address().port), "the server");
  thief.receive(after_seconds(10));
  thief.send(static_cast<uint16_t>(MessageType::kProof), recorded);
  keeper.thread.join();
  EXPECT_NE(keeper.error.find("token of this connection is wrong"), std::string::npos) << keeper.error;
}

TEST(Address, StrangersMaySendLittleAndNothingElse) {
  const Place place;
  const Listener listener({}, place.environment);
  const std::string bodies[] = {"GET / HTTP/1.1\r\n\r\n            ",
                                frame_bytes(2, 0, std::string(2000, 'x')),
                                frame_bytes(static_cast<uint16_t>(MessageType::kHello), 0, "hello")};
  for (const std::string& bytes : bodies) {
    Doorkeeper keeper(listener, listener.token());
    const Descriptor raw = raw_connection(listener.address().port);
    ASSERT_EQ(::send(raw.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    keeper.thread.join();
    EXPECT_NE(keeper.error, "");
  }
}

TEST(Address, TheTokenIsOfItsUserAlone) {
  const Place place;
  const Listener listener({}, place.environment);
  const int64_t port = listener.address().port;
  EXPECT_EQ(read_token(place.environment, port), listener.token());
  const std::string path = fmt::format("{}/trireme/token-{}", place.folder.path(), port);
  struct stat status {};
  ::stat(path.c_str(), &status);
  EXPECT_EQ(status.st_mode & 07777, 0600U);
  ::chmod(path.c_str(), 0644);
  EXPECT_NE(said_by([&] { read_token(place.environment, port); }).find("of this user alone"),
            std::string::npos);
}

}  // namespace
}  // namespace trireme::controller
