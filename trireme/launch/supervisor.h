#pragma once
// Watches the ranks of a job from start to end: carries their output, forwards signals, and when one fails
// gives the others time to report before it stops them. One thread, one poll loop.
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/launch/child.h"
#include "trireme/launch/exits.h"
#include "trireme/launch/local.h"
#include "trireme/launch/poll_set.h"
#include "trireme/launch/running_time.h"
#include "trireme/launch/signals.h"
#include "trireme/launch/tee.h"

namespace trireme::launch {

/// A rank and our ends of its pipes; `out` is closed where stdout is inherited.
struct Rank {
  int64_t rank = 0;
  Child child;
  Descriptor out, err;
  bool asked = false;     ///< told to stop
  bool ended = false;     ///< its process has ended, but processes that it started still run
  char stuck = 0;         ///< as RankExit has it
  double hung_s = 0.0;    ///< likewise
  uint64_t beats = 0;     ///< its signs of life at the last look
  double silent_s = 0.0;  ///< since the last of them
};

class Supervisor {
 public:
  /// Made before the first rank starts. All arguments must outlive this. `flights`: where ranks give signs of
  /// life; none: nowhere.
  Supervisor(Tee& tee, SignalTrap& signals, const LocalJob& job, const FlightRecord* flights)
      : tee_(tee), signals_(signals), job_(job), flights_(flights), starved_lately_(starved_so_far()) {}

  void add(Rank rank) { ranks_.push_back(std::move(rank)); }

  /// Returns once every rank has ended and its output is out. run_local() states the rules.
  JobEnd run();

 private:
  void wait_for_events();
  double seconds_to_next_deadline() const;
  void watch_output(PollSet& poll, Rank& rank);

  void take_output(Rank& rank, Stream stream);
  void drain(Rank& rank, Stream stream);
  void collect(Rank& rank);
  bool lingers(Rank& rank) const;
  void collect_without_pidfds();

  void take_signals();
  void forward(int number);
  int64_t starved_so_far() const;
  void look_for_starved(double now);
  bool watches_for_hung() const { return flights_ != nullptr && job_.silence_s > 0.0; }
  void look_for_hung();
  void look_for_limit();
  void kill_all();

  void judge_failures();
  std::vector<int64_t> ranks_that_explain() const;
  bool heeded_signal() const;
  void report(const RankExit& exit);
  void advance_stop();
  void ask_to_stop();
  void kill_stubborn(const std::string& when);

  void finish_output();
  int verdict() const;

  Tee& tee_;
  SignalTrap& signals_;
  const LocalJob& job_;
  const FlightRecord* flights_;
  std::vector<Rank> ranks_;
  int64_t running_ = 0;
  int64_t starved_before_ = 0;  ///< kills by the kernel for want of memory, at the look before the last
  int64_t starved_lately_ = 0;  ///< and at the last look
  double next_look_ = 0.0;
  RunningTime time_;                  ///< of the deadlines below
  std::optional<double> beats_read_;  ///< when the signs of life were last read
  std::vector<RankExit> exits_;       ///< all, in the order seen
  std::vector<RankExit> failures_;    ///< not yet judged
  std::optional<RankExit> cause_;     ///< the failure that decides the job's exit code
  std::optional<double> stop_began_;  ///< set when a failure is reported
  std::optional<double> forwarded_at_;
  bool asked_to_stop_ = false, killed_stubborn_ = false;
  int forwarded_ = 0;          ///< the first signal we were sent
  double signalled_at_ = 0.0;  ///< when, by the clock of whoever sent it
  int killed_by_ = 0;          ///< the second one, or SIGALRM for the limit
};

}  // namespace trireme::launch
