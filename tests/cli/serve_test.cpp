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
                       {"ps", "-p", "x"}};
  for (const Words& words : bad) EXPECT_EQ(here.front.run(words).code, 2) << words.back();
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
