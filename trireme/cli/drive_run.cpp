#include "trireme/cli/drive_run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/streams.h"
#include "trireme/cli/child.h"
#include "trireme/cli/run_action.h"
#include "trireme/cli/serving.h"
#include "trireme/cli/status_view.h"
#include "trireme/controller/client_session.h"
#include "trireme/controller/greeting.h"
#include "trireme/launch/signals.h"

namespace trireme::cli {
namespace {

using controller::Address;
using controller::ClientSession;

/// Workers have the next steps before they ask, so that none waits for the client.
constexpr size_t kStepsAhead = 2;
constexpr double kLook_s = 0.1;  ///< how often a waiting client looks for signals
/// Ranks whose machine is busy give no sign of life for long, and training has its own limits for hangs.
constexpr double kSilence_s = 30.0;

/// The signal that the user has sent by now; 0: none. Asked while the client waits.
using StopAsked = std::function<int()>;

/// A client that leaves a run which its user gave up.
struct Abandoned {
  int signal;
};

class RunDriver {
 public:
  RunDriver(ClientSession& session, StopAsked stop_asked)
      : session_(session), stop_asked_(std::move(stop_asked)) {}

  /// Whether stdout did not take all lines, though somebody reads it.
  bool has_lost_output() const { return is_lost_ && was_read_; }

  /// Returns the exit code of the run.
  int run(const Request& request) {
    RunAnswer answer = answer_to({.kind = RunAction::Kind::kBuild, .request = request});
    while (!answer.is_over) {
      while (under_way_.size() < kStepsAhead) ask({.stop_signal = stop_asked_()});
      answer = next_answer();
    }
    while (!under_way_.empty()) next_answer();
    answer = answer_to({.kind = RunAction::Kind::kFinish});
    while (answer.has_more) answer = answer_to({.steps = 0});
    return answer.exit_code;
  }

 private:
  void ask(const RunAction& action) {
    under_way_.push_back(session_.request());
    session_.act(under_way_.back().id(), to_json(action));
  }

  RunAnswer answer_to(const RunAction& action) {
    ask(action);
    return next_answer();
  }

  RunAnswer next_answer() {
    ClientSession::Request& oldest = under_way_.front();
    while (!oldest.wait(kLook_s)) stop_asked_();
    RunAnswer answer = run_answer_from_json(oldest.get().bytes);
    under_way_.pop_front();
    print(answer.lines);
    return answer;
  }

  /// Keeps the run going when nobody reads its lines any more.
  void print(const std::string& lines) try {
    if (!is_lost_) write_all(STDOUT_FILENO, lines.data(), lines.size(), "standard output");
  } catch (const EnvironmentError& error) {
    is_lost_ = true;
    was_read_ = !reader_left(STDOUT_FILENO);
    log_warning("step lines can no longer be printed: {}; the run continues", error.what());
  }

  ClientSession& session_;
  StopAsked stop_asked_;
  std::deque<ClientSession::Request> under_way_;
  bool is_lost_ = false, was_read_ = false;
};

/// A session on a thread beside the launcher, which waits for the workers.
class DrivingBeside {
 public:
  DrivingBeside(const Address& address, const Request& request, const Environment& environment)
      : thread_([this, address, request, environment] {
          try {
            ClientSession session({.address = address, .silence_s = kSilence_s}, environment);
            RunDriver(session, [] { return 0; }).run(request);
          } catch (const std::exception& error) {
            failure_ = error.what();
          }
        }) {}
  ~DrivingBeside() { join(); }
  DrivingBeside(const DrivingBeside&) = delete;
  DrivingBeside& operator=(const DrivingBeside&) = delete;

  void join() {
    if (thread_.joinable()) thread_.join();
  }
  /// Why it gave up; empty: it has not. After join().
  const std::string& failure() const { return failure_; }

 private:
  std::string failure_;
  std::thread thread_;
};

/// Signals of a user to a client whose workers do not hear them.
class UserSignals {
 public:
  /// Throws Abandoned at a second request.
  int asked() {
    const auto now = std::chrono::steady_clock::now();
    while (const std::optional<int> signal = trap_.next()) {
      constexpr auto kSameRequest = std::chrono::seconds(1);  // terminals often send one request twice
      if (first_ != 0 && now - at_ > kSameRequest) throw Abandoned{*signal};
      if (first_ != 0) continue;
      first_ = *signal;
      at_ = now;
      log_info("stopping after the steps under way; again to leave now");
    }
    return first_;
  }
  int first() const { return first_; }

 private:
  launch::SignalTrap trap_;
  int first_ = 0;
  std::chrono::steady_clock::time_point at_ = {};
};

/// Workers have working directories of their own.
Request with_absolute_paths(Request request) {
  namespace fs = std::filesystem;
  for (std::string* const path : {&request.run_dir, &request.runs_root, &request.resume_from}) {
    if (!path->empty()) *path = fs::absolute(*path).lexically_normal().string();
  }
  return request;
}

}  // namespace

launch::JobEnd run_with_own_workers(launch::Launcher& launcher, launch::LocalJob job, const Request& request,
                                    plan::Device device, const Environment& environment) {
  const std::string socket = fmt::format("{}/train-{}", controller::runtime_folder(environment), ::getpid());
  controller::Dispatcher dispatcher(
      {.address = {.path = socket, .port = 0}, .workers = job.ranks, .silence_s = kSilence_s, .owned = true},
      environment);
  Request worker = request;
  worker.verb = "controller";
  worker.controller = {
      .address = dispatcher.address().text(), .device = std::string(plan::name(device)), .prints = true};
  job.args = {worker.verb};
  job.environment = worker_environment(environment, worker);
  DrivingBeside driving(dispatcher.address(), request, environment);
  Serving serving(dispatcher);  // ends first, and with it the session, whatever is thrown here
  launch::JobEnd end = launcher.run(job);
  serving.end();
  driving.join();
  // Workers whose client has failed end as if they had been told to; only it knows why.
  if (!end.cause && end.signal == 0 && !driving.failure().empty()) {
    log_error("{}", driving.failure());
    end.code = static_cast<int>(ExitCode::kCommunication);
  }
  return end;
}

launch::JobEnd run_on_server(const Address& address, const Request& request, const Environment& environment) {
  ClientSession session({.address = address}, environment);
  UserSignals signals;
  launch::JobEnd end;
  try {
    RunDriver driver(session, [&] { return signals.asked(); });
    end.code = driver.run(with_absolute_paths(request));
    end.output_lost = driver.has_lost_output();
  } catch (const Abandoned& abandoned) {
    end.code = 128 + abandoned.signal;
  } catch (const CommError& error) {
    log_error("{}", error.what());
    end.code = static_cast<int>(session.failure_code().value_or(static_cast<int64_t>(error.exit_code())));
  }
  end.signal = signals.first();
  return end;
}

ServerWorkers workers_of_server(const Address& address, const Environment& environment) {
  const controller::Status status = controller::ask_status(address, environment, kStatusAnswer_s);
  if (std::ssize(status.workers) < status.wanted_workers) {
    throw CommError(
        "[cli.train] the server at {} has {} of {} workers; start the others with 'trireme worker'",
        address.text(), status.workers.size(), status.wanted_workers);
  }
  const auto is_gpu = [](const controller::WorkerStatus& one) {
    return one.worker.devices.starts_with("cuda");
  };
  const auto gpus = std::ranges::count_if(status.workers, is_gpu);
  if (gpus != 0 && gpus != status.wanted_workers) {
    throw ConfigError(
        "[cli.train] {} of the {} workers at {} compute on GPUs, the others do not; give all one "
        "--device",
        gpus, status.wanted_workers, address.text());
  }
  return {.count = status.wanted_workers, .on_gpus = gpus > 0};
}

}  // namespace trireme::cli
