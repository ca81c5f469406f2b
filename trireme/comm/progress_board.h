#pragma once
// Where every rank is, so that the one that waits in vain can say whom it waits for. Each rank notes its
// current operation in memory; a background thread with its own store connection publishes it, at most once a
// second and only when it changed. Failures are published at once. However many ranks there are, a report of
// a failure costs each of them a bounded number of store calls.
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "trireme/comm/operation.h"

namespace c10d {
class Store;
}

namespace trireme {
class FlightRecord;
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
    double since = 0.0;        ///< seconds since 1970
    std::string subject = {};  ///< what the operation works on; may be empty
  };

  /// What keeps the other ranks from an operation.
  enum class Cause {
    kMissing,   ///< one of them has left, is silent or slow
    kDiverged,  ///< each is in some operation, and not all in the same one: nobody is missing or slow
    kElsewhere  ///< the same, but one is in a group with others, and may wait for one of those
  };
  /// Where the other ranks are, seen from one that failed.
  struct Report {
    std::string text;
    Cause cause = Cause::kMissing;
  };

  struct Options {
    std::chrono::milliseconds period = std::chrono::seconds(1);  ///< between two publications
    bool listens = false;                            ///< asks once a period whether other ranks have failed
    std::string host = "the process that hosts it";  ///< of the store, in words
    std::shared_ptr<FlightRecord> record = {};       ///< notes go there as well; none: nowhere
    std::function<void()> hurry =
        {};  ///< called before a report, so that a store that is silent costs little time
  };

  /// Every rank calls this before any rank makes a board: it makes the entry that reports will read.
  static void enter(c10d::Store& store, int64_t rank);

  /// `store` is a connection that nobody else uses; its calls must end by themselves.
  ProgressBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank);
  ProgressBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank, Options options);
  ProgressBoard(const ProgressBoard&) = delete;
  ProgressBoard& operator=(const ProgressBoard&) = delete;
  ~ProgressBoard();

  /// Costs a lock and a copy of a few words; called before and after every operation.
  void note(State state, const Operation& operation, std::string_view subject = {});

  /// This rank has made a group of `ranks`: whoever reads the record knows for whom it waits there, and
  /// reports know who else is in it.
  void note_group(std::string_view name, const std::vector<int64_t>& ranks);

  /// Publishes that `operation` failed here, gives the others of `ranks` up to 2 s to publish the same, and
  /// says where each of them is. Does not throw: a lost store is part of the answer.
  Report report_failure(const Operation& operation, const std::vector<int64_t>& ranks,
                        std::string_view subject = {}) noexcept;

  /// "rank 2 failed in all_reduce #7 of group dp": the first of `ranks` but this one whose failure has been
  /// heard of. Empty when there is none, or when this board does not listen.
  std::string heard_about(const std::vector<int64_t>& ranks) const;

  /// Stops the thread and publishes that this rank goes.
  void leave();

  bool failed() const;
  /// The store could not be reached; another attempt would fail too.
  bool store_lost() const;

 private:
  void run();
  void publish();
  void publish_failure(const Operation& operation, std::string_view subject);
  void listen();
  void mark_store_lost(const std::exception& error);
  Report collect_report(const Operation& operation, const std::vector<int64_t>& ranks,
                        std::string_view subject);
  /// Of `rank`, one of `ranks`, that was last seen so.
  Cause cause_at(int64_t rank, const std::optional<Sighting>& seen, const Operation& operation,
                 const std::vector<int64_t>& ranks) const;
  int64_t passed_in(std::string_view group) const;
  bool read(const std::vector<int64_t>& ranks, std::vector<std::string>& texts);
  std::vector<std::string> read_when_settled(const std::vector<int64_t>& ranks);

  /// A group of which this rank is.
  struct OwnGroup {
    std::vector<int64_t> ranks;
    int64_t passed = 0;  ///< the last of its operations that this rank has left
  };

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_;
  Options options_;
  std::mutex publish_mutex_;  ///< taken before mutex_; keeps what is published in order
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  Sighting current_;
  std::map<std::string, OwnGroup, std::less<>> groups_;
  std::map<int64_t, std::string> heard_;  ///< failures of other ranks, in words
  std::string lost_because_;              ///< what the store's last call threw
  bool changed_ = false, failed_ = false, store_lost_ = false, stopping_ = false;
  std::thread thread_;
};

/// "i 41 all_gather 1763683200.125 dp", with a tab and the subject behind it where there is one, and back;
/// nothing for any other text.
std::string to_text(const ProgressBoard::Sighting& sighting);
std::optional<ProgressBoard::Sighting> parse_sighting(const std::string& text);

/// One phrase about `rank` as seen by a rank that fails in `operation` at time `now`; empty when it fails or
/// waits in the same operation on the same `subject`. An empty `text` means that the rank has published
/// nothing; `passed` is then the last operation of the group that this rank has completed, 0: none.
std::string describe_sighting(int64_t rank, const std::string& text, const Operation& operation, double now,
                              std::string_view subject = {}, int64_t passed = 0);

/// "all_gather #41 for blocks.1 of group dp".
std::string in_words(const Operation& operation, std::string_view subject);

}  // namespace trireme::comm
