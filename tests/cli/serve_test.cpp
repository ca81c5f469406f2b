// trireme serve and trireme ps, as two processes.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "tests/cli/front_process.h"
#include "trireme/cli/status_view.h"
#include "trireme/controller/client_session.h"
#include "trireme/controller/worker_link.h"

namespace trireme::cli {
namespace {

/// A front command whose sockets lie in a folder of the test.
struct ServedFront {
  ServedFront() {
    std::filesystem::create_directory(front.file("run"));
    for (FrontProcess* const one : {&front, &watcher}) one->set("XDG_RUNTIME_DIR", front.file("run"));
  }
  /// The status once there is a server.
  Outcome status(const Words& more = {}) const {
    Outcome seen;
    for (int i = 0; i < 200; ++i) {
      seen = watcher.run(Words{"ps", "--socket", socket} + more);
      if (seen.code == 0) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return seen;
  }

  FrontProcess front, watcher;  ///< each keeps the output of one command
  std::string socket = front.file("run/own/s");
};

TEST(Serve, SaysWhereItListensAndEndsInOrder) {
  const ServedFront here;
  auto server = here.front.start({"serve", "-n", "2", "--socket", here.socket});
  const auto json = here.status({"--json"}).json();
  EXPECT_EQ(json["wanted_workers"], 2);
  EXPECT_EQ(json["client"], nullptr);
  EXPECT_EQ(json["workers"].size(), 0U);
  const Outcome text = here.status();
  EXPECT_TRUE(contains(text.out, "waits for 2 of 2 workers")) << text.out;
  server.signal(SIGINT);
  const Outcome ended = server.wait(20);
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ended.out, "serving 2 workers at unix:" + here.socket + "\n");
  EXPECT_FALSE(std::filesystem::exists(here.socket));
}

TEST(Serve, ShowsItsWorkersAndTheClient) {
  const ServedFront here;
  auto server = here.front.start({"serve", "-n", "1", "--socket", here.socket});
  here.status();
  const Environment environment({{"XDG_RUNTIME_DIR", here.front.file("run")}});
  const controller::Address address{.path = here.socket};
  controller::WorkerSettings settings;
  settings.address = address;
  settings.devices = "cuda:0";
  {
    controller::WorkerLink worker(settings, environment);
    controller::ClientSession client({.address = address}, environment);
    client.submit("x", 1234);
    client.flush();
    while (!std::holds_alternative<controller::Instructions>(
        worker.next(10).value_or(controller::SessionBegin{}))) {
    }
    worker.progress(1000);
    client.wait_executed(1000);
    const auto json = here.status({"--json"}).json();
    EXPECT_EQ(json["submitted"], 1234);
    EXPECT_EQ(json["workers"][0]["executed"], 1000);
    EXPECT_EQ(json["workers"][0]["devices"], "cuda:0");
    const Outcome text = here.status();
    EXPECT_TRUE(contains(text.out, "submitted 1,234 instructions")) << text.out;
    const Outcome top =
        here.watcher.run({"top", "--socket", here.socket, "--count", "2", "--interval", "0.1"});
    EXPECT_EQ(top.code, 0) << top.err;
    EXPECT_TRUE(contains(top.out, "executed  rate  behind")) << top.out;
    EXPECT_TRUE(contains(top.out, "1,000   0/s     234")) << top.out;
    EXPECT_TRUE(contains(text.out, "cuda:0")) << text.out;
  }
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(20).code, 0);
}

TEST(Serve, NamesWorkersThatDoNotCome) {
  const ServedFront here;
  const Outcome outcome = here.front.run({"serve", "-n", "2", "-p", "0", "--timeout", "0.2"});
  EXPECT_EQ(outcome.code, 5);
  EXPECT_TRUE(contains(outcome.err, "workers 0, 1 of 2 did not come within 0.2 s")) << outcome.err;
}

TEST(Serve, BadWordsAreUsageErrors) {
  const ServedFront here;
  const Words bad[] = {{"serve"},
                       {"serve", "-n", "0"},
                       {"serve", "-n", "2", "-p", "70000"},
                       {"serve", "-n", "2", "--timeout", "-1"},
                       {"serve", "-n", "2", "-p", "1", "--socket", "/tmp/x"},
                       {"serve", "-n", "2", "--host", "127.0.0.2"},
                       {"serve", "-n", "2", "--host", "0.0.0.0", "--token", "token"},
                       {"serve", "-n", "2", "--token", "token"},
                       {"serve", "-n", "2", "--host", "127.0.0.2", "--socket", "/tmp/x"},
                       {"serve", "-n", "2", "--host", "127.0.0.2", "--cert", "cert.pem"},
                       {"worker", "--host", "127.0.0.2"},
                       {"ps", "--host", "127.0.0.2"},
                       {"ps", "-p", "x"}};
  for (const Words& words : bad) EXPECT_EQ(here.front.run(words).code, 2) << words.back();
}

/// "serving 1 worker at tcp:127.0.0.2:40001" ends in the port.
std::string port_served(const FrontProcess& front) {
  for (int i = 0; i < 400; ++i) {
    const std::string said = front.said();
    if (said.ends_with('\n')) return said.substr(said.rfind(':') + 1, said.size() - said.rfind(':') - 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
  }
  return "none";
}

/// The server makes the token; who does not know it learns nothing.
TEST(Serve, BeyondThisHostByATokenAlone) {
  if (!controller::has_tls()) GTEST_SKIP() << "this build has no OpenSSL";
  const ServedFront here;
  const std::string token = here.front.file("token");
  auto server = here.front.start({"serve", "-n", "1", "--host", "127.0.0.2", "-p", "0", "--token", token});
  const Words there = {"--host", "127.0.0.2", "-p", port_served(here.front)};
  EXPECT_EQ(std::filesystem::status(token).permissions(), std::filesystem::perms(0600));
  const Outcome seen = here.watcher.run(Words{"ps", "--token", token} + there);
  EXPECT_EQ(seen.code, 0) << seen.err;
  EXPECT_TRUE(contains(seen.out, "waits for 1 of 1 workers")) << seen.out;
  const Outcome bare = here.watcher.run(Words{"ps"} + there);
  EXPECT_EQ(bare.code, 2);
  EXPECT_TRUE(contains(bare.err, "--token FILE")) << bare.err;
  const std::string other = here.front.file("other");
  controller::make_token_file(other);
  const Outcome wrong = here.watcher.run(Words{"ps", "--token", other} + there);
  EXPECT_EQ(wrong.code, 5);
  EXPECT_TRUE(contains(wrong.err, "different tokens")) << wrong.err;
  std::filesystem::permissions(other, std::filesystem::perms(0644));
  EXPECT_EQ(here.watcher.run(Words{"ps", "--token", other} + there).code, 3);
  EXPECT_EQ(here.watcher.run(Words{"ps", "-p", there.back()}).code, 5) << "it does not listen at 127.0.0.1";
  server.signal(SIGTERM);
  const Outcome ended = server.wait(20);
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_TRUE(contains(ended.err, "made the token " + token)) << ended.err;
  EXPECT_TRUE(contains(ended.err, "refused a new connection from 127.0.0.1")) << ended.err;
}

TEST(Serve, BeyondThisHostNeedsAnAddressOfItsOwnAndFilesThatFit) {
  if (!controller::has_tls()) GTEST_SKIP() << "this build has no OpenSSL";
  const ServedFront here;
  const std::pair<Words, const char*> bad[] = {
      {{"--host", "192.0.2.77", "--token", "token"}, "is no address of this host"},
      {{"--host", "127.0.0.2", "--cert", "c", "--key", "none", "--ca", "c"}, "private key"},
      {{"--host", "nowhere.invalid", "--token", "token"}, "is not known here"}};
  for (const auto& [words, part] : bad) {
    const Outcome refused = here.front.run(Words{"serve", "-n", "2"} + words);
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_TRUE(contains(refused.err, part)) << refused.err;
  }
}

TEST(Ps, WithoutAServerSaysHowToStartOne) {
  const ServedFront here;
  for (const Words& words : {Words{"ps"}, Words{"ps", "--socket", here.socket}}) {
    const Outcome outcome = here.front.run(words);
    EXPECT_EQ(outcome.code, 5) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "trireme serve -n WORKERS")) << outcome.err;
  }
}

TEST(Top, CountsWhatWorkersDoInASecondWhileTheirClientIsTheSame) {
  const auto status_of = [](uint64_t session, uint64_t executed) {
    controller::Status status;
    status.session = session;
    status.workers = {
        {.worker = {.number = 0, .pid = 7, .host = "here", .data_address = {}, .devices = "cpu"},
         .executed = executed}};
    return status;
  };
  EXPECT_EQ(rates_between(status_of(1, 100), status_of(1, 350), 0.5), std::vector<double>{500.0});
  EXPECT_EQ(rates_between(status_of(1, 100), status_of(2, 350), 0.5), std::vector<double>{0.0});
  EXPECT_EQ(rates_between({}, status_of(1, 350), 0.5), std::vector<double>{0.0});
}

TEST(Top, NeedsAServerAndAnIntervalThatCanBe) {
  const FrontProcess front;
  EXPECT_EQ(front.run({"top", "-p", "23999"}).code, 5);
  const Outcome refused = front.run({"top", "--interval", "0"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "give 0.1 to 3600")) << refused.err;
}

}  // namespace
}  // namespace trireme::cli
