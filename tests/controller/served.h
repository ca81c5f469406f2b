#pragma once
// Workers in processes of their own, for tests of what happens when they fail.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "trireme/base/clock.h"
#include "trireme/controller/remote_program.h"
#include "trireme/launch/child.h"

namespace trireme {

/// A server with its workers, and a program of theirs.
class Served {
 public:
  explicit Served(int64_t workers) {
    const Environment environment = Environment::process();
    const std::string socket =
        controller::runtime_folder(environment) + "/test-" + std::to_string(::getpid()) + "-" +
        std::to_string(std::chrono::steady_clock::now().time_since_epoch().count() % 100000000);
    server_.emplace(
        launch::ChildSpec{.program = TRIREME_PROGRAM,
                          .args = {"serve", "-q", "-n", std::to_string(workers), "--socket", socket,
                                   "--start-workers", "--device", "cpu", "--timeout", "30"},
                          .environment = environment});
    const double deadline = monotonic_seconds() + 30.0;
    while (!std::filesystem::exists(socket)) {
      if (monotonic_seconds() > deadline) throw std::runtime_error("the server has made no socket in 30 s");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    program_ = std::make_shared<controller::RemoteProgram>(
        controller::ClientSettings{.address = {.path = socket, .port = 0}, .timeout_s = 30}, environment);
  }

  const std::shared_ptr<controller::RemoteProgram>& program() const { return program_; }
  pid_t pid_of(size_t worker) const { return static_cast<pid_t>(program_->worker_list().at(worker).pid); }

 private:
  std::optional<launch::Child> server_;
  std::shared_ptr<controller::RemoteProgram> program_;
};

}  // namespace trireme
