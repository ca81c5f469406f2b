#pragma once
// Ranks as threads: each gets its own world over one in-memory store, on the CPU.
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/comm/world.h"

namespace trireme::test {

using RankBody = std::function<void(std::shared_ptr<comm::World>)>;

/// Both ways in which ranks of one host move bytes: with peer memory, and with messages.
inline constexpr std::array<bool, 2> kBothTransports = {true, false};

/// Runs `body` on `ranks` threads and rethrows what the first of them to fail has thrown. Every wait in a
/// world has `timeout_s`; ranks that hang all the same after `overall_s` end the process, since threads
/// cannot be ended.
inline void run_ranks(int64_t ranks, const RankBody& body, double timeout_s = 20.0, double overall_s = 90.0,
                      bool peer_memory = true,
                      const c10::intrusive_ptr<c10d::Store>& store = c10::make_intrusive<c10d::HashStore>()) {
  // c10d's flight recorder is one for the process and not safe for Gloo groups on several threads.
  ::setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  std::mutex mutex;
  std::condition_variable changed;
  std::exception_ptr first;
  int64_t running = ranks;
  const auto run = [&](int64_t rank) {
    std::exception_ptr error;
    try {
      body(comm::World::join_store(store, rank, ranks, c10::kCPU, timeout_s, {.share = peer_memory}));
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    if (!first) first = error;
    --running;
    changed.notify_all();
  };
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
  {
    std::unique_lock lock(mutex);
    if (!changed.wait_for(lock, std::chrono::duration<double>(overall_s), [&] { return running == 0; })) {
      std::fprintf(stderr, "run_ranks: %ld of %ld ranks hang after %.0f s\n", static_cast<long>(running),
                   static_cast<long>(ranks), overall_s);
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace trireme::test
