// A controller whose connections are those of several hosts: an address of the loopback interface that is not
// 127.0.0.1 stands for another host here, and needs what another host needs.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "tests/controller/certificates.h"
#include "tests/controller/fake_session.h"
#include "trireme/controller/data_address.h"
#include "trireme/controller/greeting.h"

namespace trireme::controller {
namespace {

using namespace test;

constexpr const char* kElsewhere = "127.0.0.2";

void go_beyond(DispatcherSettings& settings) {
  settings.address = address_of(kElsewhere, 0);
}

void expect_said(const std::string& said, const std::string& part) {
  EXPECT_NE(said.find(part), std::string::npos) << "'" << said << "' lacks '" << part << "'";
}

/// Two workers and a client on all their connections.
void expect_a_session(const Server& server) {
  const Workers workers = recording_workers(server, 2);
  const auto client = server.client();
  for (const WorkerInfo& worker : client->workers()) {
    const DataAddress data = parse_data_address(worker.data_address);
    EXPECT_EQ(data.address.host, kElsewhere);
    EXPECT_EQ(data.secret.size(), kTokenBytes);
  }
  const std::string bytes(5'000'000, 'b');
  for (int64_t worker : {0, 1}) client->data_connection(worker).put(7, bytes);
  client->submit("bulk", 1);
  client->act(5, std::string(900'000, 'x'));
  client->wait_executed(2);
  for (int64_t worker : {0, 1}) EXPECT_TRUE(client->data_connection(worker).take(8) == bytes + "!") << worker;
  const Status status = ask_status(server.dispatcher->address(), server.environment, 10);
  ASSERT_EQ(status.workers.size(), 2U);
  EXPECT_EQ(status.workers[1].executed, 2U);
  EXPECT_EQ(status.workers[1].worker.data_address, without_secret(client->workers()[1].data_address));
  EXPECT_EQ(status.workers[1].worker.data_address.find('?'), std::string::npos);
}

TEST(Beyond, ASessionByToken) {
  Server server(2, false, go_beyond);
  expect_a_session(server);
  EXPECT_EQ(server.end(), "");
}

void use(Environment& environment, const CertificateFiles& files) {
  const CredentialFiles named{
      .certificate = files.certificate, .key = files.key, .authority = files.authority};
  named.put_into(environment);
}

TEST(Beyond, ASessionByCertificate) {
  const TemporaryFolder folder;
  Authority authority(folder.path(), "ours");
  const CertificateFiles files = authority.issue(kElsewhere);
  Server server(2, false, go_beyond, [&](Environment& environment) { use(environment, files); });
  expect_a_session(server);
  EXPECT_EQ(server.end(), "");
}

/// The server learns it when the client has sent its first message already, and does not close before the
/// client has read why, which could be lost with the connection.
TEST(Beyond, ACertificateOfAnotherAuthorityIsToldSo) {
  const TemporaryFolder folder;
  Authority ours(folder.path(), "ours"), theirs(folder.path(), "theirs");
  const CertificateFiles files = ours.issue(kElsewhere);
  const Server server(1, false, go_beyond, [&](Environment& environment) { use(environment, files); });
  CertificateFiles strange = theirs.issue("laptop");
  strange.authority = files.authority;
  Environment environment;
  use(environment, strange);
  for (int i = 0; i < 20; ++i) {
    const std::string said = error_from([&] { ask_status(server.dispatcher->address(), environment, 10); });
    expect_said(said, "the peer refuses this side's certificate");
  }
}

TEST(Beyond, NothingListensWithoutATokenOrACertificate) {
  const auto said_with = [](const std::function<void(Environment&)>& change) {
    return error_from([&] { Server(1, false, go_beyond, change); });
  };
  expect_said(said_with([](Environment& one) { one.unset(kTokenVariable); }),
              "only a token or a certificate");
  expect_said(said_with([](Environment& one) { one.set(kKeyVariable, "key.pem"); }), "both a token");
  expect_said(said_with([](Environment& one) {
                one.unset(kTokenVariable);
                one.set(kKeyVariable, "key.pem");
              }),
              "only some are named");
  expect_said(said_with([](Environment& one) { one.set(kTokenVariable, "/nowhere/token"); }),
              "there is no token /nowhere/token");
}

/// A host's own name is often one of these.
TEST(Beyond, ANameThatIsLoopbackHereIsNoneToListenAt) {
  const std::string said = error_from([] {
    Server(1, false, [](DispatcherSettings& settings) { settings.address = address_of("LOCALHOST", 0); });
  });
  expect_said(said, "where other hosts cannot reach it");
}

TEST(Beyond, AnotherWordForAllAddressesIsNoneToListenAt) {
  for (const char* host : {"0.0", "0x0.0"}) {
    const auto change = [&](DispatcherSettings& settings) { settings.address = address_of(host, 0); };
    expect_said(error_from([&] { Server(1, false, change); }), "stands for every address");
  }
}

TEST(Beyond, AnAddressOfAnotherHostIsNoneToListenAt) {
  const std::string said = error_from([] {
    Server(1, false, [](DispatcherSettings& settings) { settings.address = address_of("192.0.2.77", 0); });
  });
  expect_said(said, "192.0.2.77");
  expect_said(said, "no address of this host");
}

/// Connects as anybody can, and says something.
Descriptor stranger(int64_t port, const std::string& says = "") {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(port));
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name), 0);
  if (!says.empty()) ::send(socket.get(), says.data(), says.size(), MSG_NOSIGNAL);
  return socket;
}

/// Whatever strangers do, and however many there are, those with the token are served.
TEST(Beyond, StrangersAreRefusedAndTheOthersGoOn) {
  std::atomic<int> plain{0}, wrong{0};
  const Server server(2, false, [&](DispatcherSettings& settings) {
    go_beyond(settings);
    settings.say = [&](const std::string& line) {
      const bool is_refusal = line.find("refused a new connection from 127.0.0.1") != std::string::npos;
      plain += is_refusal && line.find("speaks no TLS") != std::string::npos;
      wrong += is_refusal && line.find("different tokens") != std::string::npos;
    };
  });
  const int64_t port = server.dispatcher->address().port;
  std::vector<Descriptor> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(stranger(port));
  const Hello hello{.role = Role::kClient, .version = kVersion, .build = build_id(), .pid = 7};
  const Descriptor talks =
      stranger(port, frame_bytes(static_cast<uint16_t>(Hello::kType), 0, body_of(hello)));
  Environment other = server.environment;
  other.set(kTokenVariable, server.folder.file("other"));
  make_token_file(server.folder.file("other"));
  expect_said(error_from([&] { ask_status(server.dispatcher->address(), other, 10); }), "different tokens");
  other.unset(kTokenVariable);
  expect_said(error_from([&] { ask_status(server.dispatcher->address(), other, 10); }), "--token FILE");
  expect_a_session(server);
  EXPECT_EQ(plain, 1);
  EXPECT_EQ(wrong, 1);
}

TEST(Beyond, ThousandsOfStrangersNeitherFillTheLogNorEndTheSession) {
  std::atomic<int> lines{0};
  const Server server(2, false, [&](DispatcherSettings& settings) {
    go_beyond(settings);
    settings.say = [&](const std::string&) { ++lines; };
  });
  const Workers workers = recording_workers(server, 2);
  const auto client = server.client();
  const int64_t port = server.dispatcher->address().port;
  for (uint64_t i = 0; i < 2000; ++i) {
    const Descriptor socket = stranger(port, "GET / HTTP/1.1\r\n\r\n");
    client->submit("x", 1);
    if (i % 100 == 99) client->wait_executed(i + 1);
  }
  client->wait_executed(2000);
  EXPECT_LT(lines, 40);
}

/// Its messages wait in TLS as they do without.
TEST(Beyond, AReaderThatIsTooSlowIsGivenUp) {
  const Server server(1, false, [](DispatcherSettings& settings) {
    go_beyond(settings);
    settings.most_queued = 1 << 20;
    settings.silence_s = 60;
  });
  const Connection deaf = server.by_hand(Role::kWorker, 0);
  const auto client = server.client();
  const std::string said = error_from([&] {
    for (int i = 0; i < 200; ++i) client->act(1, std::string(100'000, 'x'));
    client->wait_executed(1);
  });
  expect_said(said, "worker 0 (pid 4242 on elsewhere) reads too slowly");
}

TEST(Beyond, DataOfAWorkerIsForThoseWhoKnowItsSecret) {
  const DataListener worker(kElsewhere, build_id(), 1 << 20), other(kElsewhere, build_id(), 1 << 20);
  EXPECT_NE(worker.address().secret, other.address().secret);
  WorkerInfo info{
      .number = 3, .pid = 7, .host = "node3", .data_address = worker.address().text(), .devices = {}};
  DataConnection(info, 1, {}, build_id(), 10).put(1, "bytes");
  DataAddress data = worker.address();
  data.secret.back() = static_cast<char>(data.secret.back() ^ 1);
  info.data_address = data.text();
  const std::string said = error_from([&] { DataConnection(info, 1, {}, build_id(), 10); });
  expect_said(said, "different tokens");
  expect_said(said, "worker 3 (pid 7 on node3)");
  info.data_address = without_secret(info.data_address);
  expect_said(error_from([&] { DataConnection(info, 1, {}, build_id(), 10); }), "named no secret");
  // Sixteen who say nothing leave room for the next one.
  std::vector<Descriptor> silent;
  for (int i = 0; i < 100; ++i) silent.push_back(stranger(worker.address().address.port));
  info.data_address = worker.address().text();
  DataConnection(info, 1, {}, build_id(), 10).put(2, "bytes");
}

/// The worker says why and closes, while the client is still writing.
TEST(Beyond, APutThatIsRefusedSaysWhy) {
  const DataListener worker(kElsewhere, build_id(), 1 << 20);
  const WorkerInfo info{
      .number = 3, .pid = 7, .host = "node3", .data_address = worker.address().text(), .devices = {}};
  for (int i = 0; i < 5; ++i) {
    DataConnection connection(info, 1, {}, build_id(), 10);
    expect_said(error_from([&] { connection.put(1, std::string(64 << 20, 'x')); }),
                "the client puts 64.0 MiB");
  }
}

TEST(Beyond, PassesManyInstructionsASecond) {
  const Server server(2, false, go_beyond);
  const Workers workers = recording_workers(server, 2);
  const auto client = server.client();
  const std::string instruction(200, 'i');
  constexpr uint64_t kCount = 20'000;
  for (uint64_t i = 0; i < kCount; ++i) client->submit(instruction, 1);
  client->wait_executed(kCount);
  EXPECT_EQ(client->executed(), kCount);
}

}  // namespace
}  // namespace trireme::controller
