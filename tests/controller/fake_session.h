#pragma once
// A dispatcher in a thread, and workers in threads that record what they get.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/report/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/controller/client_session.h"
#include "trireme/controller/dispatcher.h"
#include "trireme/controller/worker_link.h"

namespace trireme::controller::test {

/// The message of what `body` throws; empty: nothing.
inline std::string error_from(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

/// run() in a thread; stopped at the end of the scope.
class Server {
 public:
  /// Beyond this host all who use `environment` know one token, unless `change_environment` says otherwise.
  explicit Server(int64_t workers, bool unix_socket = true,
                  const std::function<void(DispatcherSettings&)>& change = {},
                  const std::function<void(Environment&)>& change_environment = {})
      : environment({{"XDG_RUNTIME_DIR", folder.path()}, {kTokenVariable, folder.file("token")}}) {
    make_token_file(folder.file("token"));
    if (change_environment) change_environment(environment);
    DispatcherSettings settings;
    settings.address = unix_socket ? Address{.path = folder.file("own/s"), .port = 0} : Address{};
    settings.workers = workers;
    settings.timeout_s = 20;
    if (change) change(settings);
    dispatcher = std::make_unique<Dispatcher>(settings, environment);
    thread = std::thread([this] { error = error_from([this] { dispatcher->run(); }); });
  }
  ~Server() { end(); }

  const std::string& end() {
    if (thread.joinable()) dispatcher->stop();
    return wait();
  }
  /// Until run() has ended by itself.
  const std::string& wait() {
    if (thread.joinable()) thread.join();
    return error;
  }

  std::unique_ptr<WorkerLink> worker(int64_t number = -1) const {
    WorkerSettings settings;
    settings.address = dispatcher->address();
    settings.wanted_number = number;
    settings.timeout_s = 20;
    return std::make_unique<WorkerLink>(settings, environment);
  }
  std::unique_ptr<ClientSession> client(double timeout_s = 20) const {
    return std::make_unique<ClientSession>(
        ClientSettings{.address = dispatcher->address(), .timeout_s = timeout_s}, environment);
  }
  /// A connection whose messages the test writes by hand, behind HELLO.
  Connection by_hand(Role role, int64_t number = -1, const std::string& build = build_id()) const {
    Connection connection = connect_to(dispatcher->address(), environment, "the server", after_seconds(10));
    Hello hello{.role = role, .version = kVersion, .build = build, .pid = 4242};
    hello.host = "elsewhere";
    hello.wanted_number = number;
    send(connection, hello);
    return connection;
  }

  TemporaryFolder folder;
  Environment environment;
  std::unique_ptr<Dispatcher> dispatcher;
  std::string error;
  std::thread thread;
};

/// A worker that says at once that it has executed what it got, and records it.
class RecordingWorker {
 public:
  RecordingWorker(const Server& server, int64_t number)
      : thread_([this, &server, number] { error = error_from([&] { work(*server.worker(number)); }); }) {}
  /// Leaves, where nobody has told it to.
  ~RecordingWorker() {
    leaves_ = true;
    join();
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

  std::string record;  ///< of the items, in their order
  std::string error;
  std::atomic<uint64_t> executed{0}, most{UINT64_MAX};  ///< no more than `most` are executed
  std::atomic<int> sessions_ended{0};

 private:
  void work(WorkerLink& link) {
    while (!leaves_) {
      const auto item = link.next(0.02);
      if (!item) continue;
      if (std::holds_alternative<Bye>(*item)) return;
      if (std::holds_alternative<SessionBegin>(*item)) record += "begin ", executed = 0;
      if (std::holds_alternative<SessionEnd>(*item)) {
        record += "end ";
        ++sessions_ended;
      }
      if (const auto* scope = std::get_if<Scope>(&*item)) record += "scope:" + scope->name + " ";
      if (const auto* action = std::get_if<RunAction>(&*item)) act(link, *action);
      if (const auto* some = std::get_if<Instructions>(&*item)) execute(link, *some);
    }
  }
  void act(WorkerLink& link, const RunAction& action) {
    if (action.text.size() < 100) record += "action:" + action.text + " ";
    executed = std::min<uint64_t>(executed + 1, most);
    link.progress(executed);
  }
  void execute(WorkerLink& link, const Instructions& some) {
    if (some.bytes.size() < 100) record += some.bytes + " ";
    if (some.bytes.starts_with("fail")) return link.failed(4, "no memory for t7");
    if (some.bytes.starts_with("ask") && link.number() == 1)
      link.answer(std::stoull(some.bytes.substr(3)), "2.5");
    if (some.bytes == "bulk") link.offer_bulk(8, link.take_bulk(7, 20) + "!");
    executed = std::min<uint64_t>(some.first + some.count, most);
    link.progress(executed);
  }

  std::atomic<bool> leaves_{false};
  std::thread thread_;
};

using Workers = std::vector<std::unique_ptr<RecordingWorker>>;

inline Workers recording_workers(const Server& server, int64_t count) {
  Workers workers;
  for (int64_t i = 0; i < count; ++i) workers.push_back(std::make_unique<RecordingWorker>(server, i));
  return workers;
}

}  // namespace trireme::controller::test
