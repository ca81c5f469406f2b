#pragma once
// Where every rank is, so that the one that waits in vain can say whom it waits for. Each rank notes its
// current operation in memory; a background thread with its own store connection publishes it, at most once a
// second and only when it changed. Failures are published at once.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "trireme/comm/operation.h"

namespace c10d {
class Store;
}

namespace trireme::comm {

class ProgressBoard {
 public:
  enum class State : char { kInside = 'i', kDone = 'd', kFailed = 'f', kLeft = 'l' };

  /// What a rank has published about itself.
  struct Sighting {
    State state = State::kInside;
    int64_t sequence = 0;
    std::string operation;
    std::string group;
    double since = 0.0;  ///< seconds since 1970
  };

  /// Publishes at most once per `period`.
  ProgressBoard(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                std::chrono::milliseconds period = std::chrono::seconds(1));
  ProgressBoard(const ProgressBoard&) = delete;
  ProgressBoard& operator=(const ProgressBoard&) = delete;
  ~ProgressBoard();

  /// Costs a lock and a copy of a few words; called before and after every operation.
  void note(State state, const Operation& operation);

  /// Publishes that `operation` failed here, gives the others of `ranks` up to 2 s to publish the same, and
  /// says in words where each of them is. Never throws: a lost store is part of the answer.
  std::string report_failure(const Operation& operation, const std::vector<int64_t>& ranks);

  /// Stops the thread and publishes that this rank goes.
  void leave();

  bool failed() const;
  /// The store could not be reached; another attempt would fail too.
  bool store_lost() const;

 private:
  void run();
  void publish();
  void mark_store_lost();
  bool read(const std::vector<int64_t>& ranks, std::vector<std::string>& texts);
  std::vector<std::string> read_when_settled(const std::vector<int64_t>& ranks);

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_;
  std::chrono::milliseconds period_;
  std::mutex publish_mutex_;  ///< taken before mutex_; keeps what is published in order
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  Sighting current_;
  bool changed_ = false, failed_ = false, store_lost_ = false, stopping_ = false;
  std::thread thread_;
};

/// "i 41 all_gather 1763683200.125 dp" and back. parse() of anything else throws LogicError.
std::string to_text(const ProgressBoard::Sighting& sighting);
ProgressBoard::Sighting parse_sighting(const std::string& text);

/// One phrase about `rank` as seen by a rank that fails in `operation` at time `now`; empty when it fails or
/// waits in the same operation. An empty `text` means that the rank has published nothing.
std::string describe_sighting(int64_t rank, const std::string& text, const Operation& operation, double now);

}  // namespace trireme::comm
