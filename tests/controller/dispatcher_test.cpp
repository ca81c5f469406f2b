#include "trireme/controller/dispatcher.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/controller/fake_session.h"
#include "trireme/base/clock.h"
#include "trireme/controller/greeting.h"

namespace trireme::controller {
namespace {

using namespace test;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Dispatcher, AllWorkersGetTheSameInOneOrderOverBothKindsOfSockets) {
  for (const bool unix_socket : {true, false}) {
    Server server(3, unix_socket);
    const Workers workers = recording_workers(server, 3);
    {
      const auto client = server.client();
      ASSERT_EQ(client->workers().size(), 3U);
      for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(client->workers()[static_cast<size_t>(i)].number, i);
      client->define_scope(1, "stage0", {0, 1});
      EXPECT_EQ(client->submit("one", 1), 0U);
      client->act(5, "config");
      EXPECT_EQ(client->submit("two", 2), 2U);  // an action counts
      client->wait_executed(4);
      EXPECT_EQ(client->executed(), 4U);
      auto request = client->request();
      client->submit(fmt::format("ask{}", request.id()), 1);
      const Answer answer = request.get();
      EXPECT_EQ(answer.bytes, "2.5");
      EXPECT_EQ(answer.worker, 1);
    }
    {
      const auto client = server.client();  // numbers begin anew
      EXPECT_EQ(client->submit("three", 1), 0U);
      client->wait_executed(1);
    }
    EXPECT_EQ(server.end(), "");
    for (const auto& worker : workers) {
      worker->join();
      EXPECT_EQ(worker->error, "");
      EXPECT_EQ(worker->record, "begin scope:stage0 one action:config two ask1 end begin three end ");
    }
  }
}

TEST(Dispatcher, ProgressIsThatOfTheSlowestWorkerAndNamesIt) {
  const Server server(3);
  const Workers workers = recording_workers(server, 3);
  workers[2]->most = 5;
  const auto client = server.client(0.5);
  for (int i = 0; i < 10; ++i) client->submit("x", 1);
  client->wait_executed(5);
  const std::string said = error_from([&] { client->wait_executed(10); });
  EXPECT_TRUE(has(said, "worker 2, the slowest, has executed 5 of 10 instructions")) << said;
  EXPECT_EQ(client->executed(), 5U);
}

TEST(Dispatcher, AClientThatIsTooFarAheadWaitsAndASecondOneIsRefused) {
  const Server server(1);
  const Workers workers = recording_workers(server, 1);
  workers[0]->most = 0;
  const auto client = server.client(0.3);
  const std::string said = error_from([&] {
    for (uint64_t i = 0; i < 2 * kMostAhead; ++i) client->submit("x", 1);
  });
  EXPECT_TRUE(has(said, "no more instructions were taken for 0.3 s")) << said;
  const std::string second = error_from([&] { server.client(); });
  EXPECT_TRUE(has(second, fmt::format("client (pid {}", ::getpid()))) << second;
  EXPECT_TRUE(has(second, "connected already")) << second;
}

TEST(Dispatcher, ADeadWorkerIsNamedAtOnceToAllWhoWait) {
  Server server(3, true, [](DispatcherSettings& settings) { settings.owned = true; });
  Workers workers = recording_workers(server, 2);
  auto dying = std::make_unique<Connection>(server.by_hand(Role::kWorker, 2));
  const auto client = server.client();
  auto request = client->request();
  const double began = monotonic_seconds();
  dying.reset();
  const std::string said = error_from([&] { request.get(); });
  EXPECT_LT(monotonic_seconds() - began, 1.0);
  EXPECT_TRUE(has(said, "worker 2 (pid 4242 on elsewhere) is lost: its connection closed")) << said;
  EXPECT_EQ(error_from([&] { client->wait_executed(1); }), said);
  EXPECT_EQ(server.wait(), said);
  for (const auto& worker : workers) {
    worker->join();
    EXPECT_EQ(worker->error, said);
  }
}

TEST(Dispatcher, AWorkerThatSaysWhyItEndsIsTheCause) {
  const Server server(2);
  const Workers workers = recording_workers(server, 2);
  const auto client = server.client();
  client->submit("fail", 1);
  const std::string said = error_from([&] { client->wait_executed(1); });
  EXPECT_TRUE(has(said, "failed: no memory for t7")) << said;
}

TEST(Dispatcher, AWorkerThatLostAPeerIsNotTheCulprit) {
  const Server server(2);
  Connection victim = server.by_hand(Role::kWorker, 0);
  auto culprit = std::make_unique<Connection>(server.by_hand(Role::kWorker, 1));
  const auto client = server.client();
  send(victim, Failed{.worker = 0, .code = 5, .text = "rank 1 is gone"});
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  culprit.reset();
  const std::string said = error_from([&] { client->wait_executed(1); });
  EXPECT_TRUE(has(said, "worker 1 (pid 4242")) << said;
}

TEST(Dispatcher, AWorkerThatDoesNotAnswerIsNamedAsStopped) {
  const Server server(2, true, [](DispatcherSettings& settings) { settings.silence_s = 0.5; });
  RecordingWorker alive(server, 0);
  const Connection stopped = server.by_hand(Role::kWorker, 1);
  const auto client = server.client();
  const std::string said = error_from([&] { client->wait_executed(1); });
  EXPECT_TRUE(has(said, "worker 1 (pid 4242 on elsewhere) has not answered for")) << said;
}

/// Five times as long as answers took: 1.5 s or more after those of 0.3 s, where half a second is the least.
TEST(Dispatcher, AWorkerThatAnswersSlowlyGetsMoreTime) {
  const Server server(1, true, [](DispatcherSettings& settings) { settings.silence_s = 0.5; });
  Connection slow = server.by_hand(Role::kWorker, 0);
  for (int answers = 0; answers < 4;) {
    const Frame frame = slow.receive(after_seconds(10));
    if (!is<Ping>(frame)) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    send(slow, Pong{.number = message_of<Ping>(frame).number});
    ++answers;
  }
  const double began = monotonic_seconds();
  const std::string said = error_from([&] {
    for (const auto deadline = after_seconds(20);;) {
      const Frame frame = slow.receive(deadline);
      if (is<Failed>(frame)) throw CommError("{}", message_of<Failed>(frame).text);
    }
  });
  EXPECT_TRUE(has(said, "worker 0 (pid 4242 on elsewhere) has not answered for")) << said;
  EXPECT_GT(monotonic_seconds() - began, 1.2);
}

TEST(AnswerTimes, LeaveOutTheSlowestOfAHundred) {
  AnswerTimes times;
  EXPECT_EQ(times.percentile_99(), 0.0);
  times.add(7.0);
  EXPECT_EQ(times.percentile_99(), 7.0);
  for (int i = 0; i < 98; ++i) times.add(0.01 * i);
  EXPECT_EQ(times.percentile_99(), 7.0) << "of fewer than a hundred the slowest";
  times.add(0.5);
  EXPECT_EQ(times.percentile_99(), 0.97);
  times.add(3.0);
  EXPECT_EQ(times.percentile_99(), 0.97) << "7 is forgotten";
}

TEST(Dispatcher, AClientThatWaitsForWorkersSaysSo) {
  const auto said_while_waiting = [](double patience_s) {
    Server server(2, true, [](DispatcherSettings& settings) { settings.timeout_s = 0.5; });
    RecordingWorker one(server, 1);
    testing::internal::CaptureStderr();
    error_from([&] {
      ClientSession({.address = server.dispatcher->address(), .timeout_s = 20, .patience_s = patience_s},
                    server.environment);
    });
    one.join();
    return testing::internal::GetCapturedStderr();
  };
  const std::string said = said_while_waiting(0.05);
  EXPECT_TRUE(has(said, "waiting for workers at unix:") && has(said, "for at most 20 s")) << said;
  EXPECT_FALSE(has(said_while_waiting(10.0), "waiting for workers"));
}

TEST(Dispatcher, MissingWorkersAreNamedAtTheDeadline) {
  Server server(4, true, [](DispatcherSettings& settings) { settings.timeout_s = 0.5; });
  RecordingWorker one(server, 2);
  // The client's own time is over no later.
  const std::string said = error_from([&] {
    ClientSession({.address = server.dispatcher->address(), .timeout_s = 0.4}, server.environment);
  });
  EXPECT_TRUE(has(said, "workers 0, 1, 3 of 4 did not come within 0.5 s")) << said;
  EXPECT_EQ(server.wait(), said);
  one.join();
  EXPECT_EQ(one.error, said);
}

TEST(Dispatcher, OtherBuildsAndTooManyWorkersAreRefusedByName) {
  const Server server(1);
  const auto answer_to = [&](Role role, int64_t number, const std::string& build) {
    Connection connection = server.by_hand(role, number, build);
    const Frame frame = connection.receive(after_seconds(10));
    return is<Reject>(frame) ? message_of<Reject>(frame).reason : "";
  };
  for (const Role role : {Role::kWorker, Role::kClient}) {
    const std::string said = answer_to(role, -1, "another");
    EXPECT_TRUE(has(said, "build another") && has(said, build_id())) << said;
  }
  EXPECT_EQ(answer_to(Role::kObserver, -1, "another"), "");
  EXPECT_TRUE(has(answer_to(Role::kWorker, 1, build_id()), "there is no worker 1"));
  const Workers workers = recording_workers(server, 1);
  const auto client = server.client();
  EXPECT_TRUE(has(answer_to(Role::kWorker, -1, build_id()), "all 1 workers are there"));
}

TEST(Dispatcher, WhoBreaksTheProtocolIsRefusedAndTheOthersGoOn) {
  const Server server(1);
  const Workers workers = recording_workers(server, 1);
  {
    Connection client = server.by_hand(Role::kClient);
    next_of_greeting(client, after_seconds(10));
    next_of_greeting(client, after_seconds(10));
    send(client, Instructions{.first = 7, .count = 1, .bytes = "x"});
    const std::string said = error_from([&] { next_of_greeting(client, after_seconds(10)); });
    EXPECT_TRUE(has(said, "from number 7 on came where 0 was due")) << said;
  }
  Connection garbage = connect_to(server.dispatcher->address(), server.environment, "x", after_seconds(5));
  ASSERT_GT(::write(garbage.fd(), "GET / HTTP/1.1\r\n\r\n          ", 28), 0);
  EXPECT_TRUE(has(error_from([&] { next_of_greeting(garbage, after_seconds(10)); }), "no frames of Trireme"));
  const auto client = server.client();
  client->submit("x", 1);
  client->wait_executed(1);
}

TEST(Dispatcher, AReaderThatIsTooSlowIsGivenUp) {
  const Server server(1, true, [](DispatcherSettings& settings) {
    settings.most_queued = 1 << 20;
    settings.silence_s = 60;
  });
  const Connection deaf = server.by_hand(Role::kWorker, 0);
  const auto client = server.client();
  const std::string said = error_from([&] {
    for (int i = 0; i < 100; ++i) client->act(1, std::string(100'000, 'x'));
    client->wait_executed(1);
  });
  EXPECT_TRUE(has(said, "worker 0 (pid 4242 on elsewhere) reads too slowly")) << said;
}

TEST(Dispatcher, ObserversSeeWhoIsThere) {
  const Server server(2);
  const Workers workers = recording_workers(server, 2);
  const auto client = server.client();
  client->submit("x", 3);
  client->wait_executed(3);
  Connection observer = server.by_hand(Role::kObserver);
  next_of_greeting(observer, after_seconds(10));
  send(observer, StatusRequest{});
  const auto status = message_of<Status>(next_of_greeting(observer, after_seconds(10)));
  EXPECT_EQ(status.wanted_workers, 2);
  EXPECT_EQ(status.submitted, 3U);
  EXPECT_EQ(status.client_pid, ::getpid());
  ASSERT_EQ(status.workers.size(), 2U);
  EXPECT_EQ(status.workers[1].worker.number, 1);
  EXPECT_EQ(status.workers[1].executed, 3U);
}

TEST(Dispatcher, AnOwnedOneEndsWithItsClient) {
  Server server(1, true, [](DispatcherSettings& settings) { settings.owned = true; });
  RecordingWorker worker(server, 0);
  server.client();
  EXPECT_EQ(server.wait(), "");
  worker.join();
  EXPECT_EQ(worker.error, "");
  EXPECT_EQ(worker.record, "begin end ");
}

TEST(Dispatcher, ItsEndIsNoticedByEverybody) {
  Server server(1);
  RecordingWorker worker(server, 0);
  const auto client = server.client();
  server.end();
  EXPECT_TRUE(has(error_from([&] { client->wait_executed(1); }), "the server ends"));
  worker.join();
  EXPECT_EQ(worker.error, "");
}

TEST(Dispatcher, BulkBytesGoBesideIt) {
  const Server server(2);
  const Workers workers = recording_workers(server, 2);
  const auto client = server.client();
  const std::string bytes(5'000'000, 'b');
  for (int64_t worker : {0, 1}) client->data_connection(worker).put(7, bytes);
  client->submit("bulk", 1);
  client->flush();
  for (int64_t worker : {0, 1}) EXPECT_TRUE(client->data_connection(worker).take(8) == bytes + "!") << worker;
  const std::string none = error_from([&] {
    DataConnection(client->workers()[0], client->session(), server.environment, build_id(), 0.2).take(9);
  });
  EXPECT_TRUE(has(none, "within")) << none;
}

TEST(Dispatcher, PassesManyInstructionsASecond) {
  const Server server(8);
  const Workers workers = recording_workers(server, 8);
  const auto client = server.client();
  const std::string instruction(200, 'i');
  constexpr uint64_t kCount = 100'000;
  const double began = monotonic_seconds();
  for (uint64_t i = 0; i < kCount; ++i) client->submit(instruction, 1);
  client->wait_executed(kCount);
  const double seconds = monotonic_seconds() - began;
  fmt::print("{:.0f} instructions/s of 200 bytes to 8 workers\n", kCount / seconds);
  auto connection = client->data_connection(0);
  const std::string bulk(256 << 20, 'b');
  const double put_at = monotonic_seconds();
  connection.put(1, bulk);
  fmt::print("put {:.2f} GB/s\n", 1e-9 * static_cast<double>(bulk.size()) / (monotonic_seconds() - put_at));
  EXPECT_LT(seconds, 20.0);
}

}  // namespace
}  // namespace trireme::controller
