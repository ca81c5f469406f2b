#pragma once
// The command with its real worker beside it, and a text to train on.
#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cli/front_process.h"
#include "trireme/base/clock.h"
#include "trireme/launch/listen.h"

namespace trireme::cli {

class Worker : public ::testing::Test {
 protected:
  Worker() {
    front_.use_real_worker(TRIREME_WORKER);
    front_.set("XDG_CACHE_HOME", TRIREME_TEST_CACHE);  // where the builtin corpus stays for the next test
    std::ofstream text(front_.file("text.txt"));
    for (int line = 0; line < 400; ++line)
      text << "the rowers pull " << line * 7 % 10 << " strokes in time\n";
  }

  std::string run_file(const std::string& name) const { return front_.file("runs/latest/" + name); }

  /// Steps that metrics.jsonl holds.
  std::vector<nlohmann::json> steps() const {
    std::vector<nlohmann::json> found;
    std::ifstream file(run_file("metrics.jsonl"));
    for (std::string line; std::getline(file, line);) found.push_back(nlohmann::json::parse(line));
    return found;
  }

  /// Throws std::runtime_error when `is_there` does not come true within a minute.
  template <typename Condition>
  void wait_until(Condition is_there) const {
    const double deadline = monotonic_seconds() + 60.0;
    while (!is_there()) {
      if (monotonic_seconds() > deadline) throw std::runtime_error("waited in vain");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  /// What is started next is a rank of another launcher on this host.
  void become_rank(int rank, int world_size, int port) {
    const std::string mine = std::to_string(rank), all = std::to_string(world_size);
    const std::pair<const char*, std::string> variables[] = {{"RANK", mine},
                                                             {"WORLD_SIZE", all},
                                                             {"LOCAL_RANK", mine},
                                                             {"LOCAL_WORLD_SIZE", all},
                                                             {"MASTER_PORT", std::to_string(port)},
                                                             {"MASTER_ADDR", "127.0.0.1"},
                                                             {"TORCHELASTIC_RUN_ID", "x"}};
    for (const auto& [name, value] : variables) front_.set(name, value);
  }

  /// What is started next is the second of two ranks of a launcher whose first never answers.
  void lose_peers() {
    const launch::ListenSocket& first = first_rank_.emplace(launch::listen_on_loopback());
    become_rank(1, 2, first.port);
  }

  /// The worker has loaded its libraries, and waits for the first rank.
  void wait_until_it_joins() const {
    pollfd connection{.fd = first_rank_->fd.get(), .events = POLLIN, .revents = 0};
    wait_until([&] { return ::poll(&connection, 1, 0) > 0; });
  }

  FrontProcess front_;
  std::optional<launch::ListenSocket> first_rank_;
};

inline const Words kTiny = {"train",
                            "--device=cpu",
                            "--data.path=text.txt",
                            "--model.n_layers=2",
                            "--model.d_model=32",
                            "--data.seq_len=32",
                            "--train.global_batch=4"};

}  // namespace trireme::cli
