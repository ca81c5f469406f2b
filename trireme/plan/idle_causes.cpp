// Every moment of a step has a lag behind the ideal step, made of what delayed it: stages that take longer
// than the average, messages on their way, hosts that are late. A pass that waits for a message inherits the
// lag of the pass that made it; one that waits for nothing keeps that of its rank. What lag a rank gains in a
// gap is why the gap is longer than in the ideal step.
#include "trireme/plan/idle_causes.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace trireme::plan {
namespace {

/// Seconds by cause; that of kSchedule, which delays nothing, stays 0.
using Lag = std::array<double, kIdleCauses>;

double& of(Lag& lag, IdleCause cause) {
  return lag[static_cast<size_t>(cause)];
}

/// Slack of the ideal step reduces the lag of all causes in proportion. Slack beyond all lag means that
/// passes were shorter than ideal ones.
void take_up(Lag& lag, double slack) {
  double positive = 0.0;
  for (const double part : lag) positive += std::max(0.0, part);
  const double taken = std::min(slack, positive);
  for (double& part : lag) part -= positive > 0.0 ? std::max(0.0, part) * taken / positive : 0.0;
  of(lag, IdleCause::kImbalance) -= slack - taken;
}

/// The lag at a time, behind a time of the ideal step.
struct Moment {
  double time = 0.0, ideal = 0.0;
  Lag lag = {};

  /// Until `later`, for a cause.
  void delay(double later, IdleCause cause) {
    if (later <= time) return;
    of(lag, cause) += later - time;
    time = later;
  }
  void wait_for_ideal(double later) {
    take_up(lag, later - ideal);
    ideal = later;
  }
};

class Step {
 public:
  Step(const Schedule& schedule, const StageEvents& events, double seconds, const Simulation& ideal)
      : schedule_(schedule),
        events_(events),
        seconds_(seconds),
        ideal_(ideal),
        ranks_(events.size()),
        spans_(events.size()) {}

  std::vector<std::vector<IdleSpan>> run() {
    // Events go in each rank's own order, and a wait only behind the pass that it waits for.
    std::vector<size_t> next(events_.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < next.size(); ++rank) {
        while (next[rank] < events_[rank].size() && can_run(events_[rank][next[rank]])) {
          run(rank, events_[rank][next[rank]++]);
          moved = true;
        }
      }
    }
    end();
    return std::move(spans_);
  }

 private:
  struct RankState {
    Moment now;        ///< behind the last event
    Moment last_pass;  ///< its end
    size_t passes = 0;
  };
  using Place = std::tuple<Message, int64_t, int64_t>;

  static Place needed_by(const StageEvent& wait) { return {wait.message, wait.stage, wait.micro_batch}; }
  bool can_run(const StageEvent& event) const {
    return event.kind != ActionKind::kRecv || made_.contains(needed_by(event));
  }

  void run(size_t rank, const StageEvent& event) {
    RankState& state = ranks_[rank];
    Moment& now = state.now;
    if (event.kind == ActionKind::kReduce || event.kind == ActionKind::kUpdate) return;
    now.delay(event.begin, IdleCause::kHost);
    if (event.is_pass()) return run_pass(rank, event);
    if (event.kind == ActionKind::kRecv) {
      const Moment& made = made_.at(needed_by(event));
      if (made.time > now.time) now = made;
      if (now.time > event.end) {  // by as much clocks of ranks differ
        of(now.lag, IdleCause::kCommunication) -= now.time - event.end;
        now.time = event.end;
      }
    }
    now.delay(event.end, IdleCause::kCommunication);
  }

  void run_pass(size_t rank, const StageEvent& event) {
    RankState& state = ranks_[rank];
    const TimedPass& ideal = ideal_.ranks[rank].passes[state.passes++];
    state.now.wait_for_ideal(ideal.begin);
    add_gap(rank, state.last_pass, state.now);
    Moment& now = state.now;
    of(now.lag, IdleCause::kImbalance) += (event.end - now.time) - (ideal.end - ideal.begin);
    now.time = event.end;
    now.ideal = ideal.end;
    state.last_pass = now;
    for (const StageEdge& made : made_by(schedule_, event.pass()))
      made_[{made.message, made.stage, event.micro_batch}] = now;
  }

  /// Ranks that are done wait for the one that ends the step.
  void end() {
    const Moment* last = nullptr;
    for (const RankState& state : ranks_) {
      if (last == nullptr || state.last_pass.time > last->time) last = &state.last_pass;
    }
    if (last == nullptr) return;
    Moment at_end = *last;
    at_end.time = seconds_;
    at_end.wait_for_ideal(ideal_.makespan);
    for (size_t rank = 0; rank < ranks_.size(); ++rank) add_gap(rank, ranks_[rank].last_pass, at_end);
  }

  void add_gap(size_t rank, const Moment& from, const Moment& to) {
    const double gap = to.time - from.time;
    if (gap <= 0.0) return;
    Lag parts{};
    of(parts, IdleCause::kSchedule) = to.ideal - from.ideal;
    double gained = parts[0], lost = 0.0;
    for (size_t cause = 1; cause < kIdleCauses; ++cause) {
      const double change = to.lag[cause] - from.lag[cause];
      parts[cause] = std::max(0.0, change);
      gained += parts[cause];
      lost += std::max(0.0, -change);
    }
    // Lag that the rank has lost has made the gap shorter than in the ideal step, or than its causes.
    const double from_schedule = std::min(parts[0], lost);
    parts[0] -= from_schedule;
    gained -= from_schedule;
    const double share = gained > 0.0 ? gap / gained : 0.0;
    double time = from.time;
    for (size_t cause = 0; cause < kIdleCauses; ++cause) {
      const double end = cause + 1 == kIdleCauses ? to.time : std::min(to.time, time + share * parts[cause]);
      if (parts[cause] > 0.0 && end > time) {
        spans_[rank].push_back({time, end, static_cast<IdleCause>(cause)});
        time = end;
      }
    }
    if (time < to.time && !spans_[rank].empty()) spans_[rank].back().end = to.time;  // what rounding left
  }

  const Schedule& schedule_;
  const StageEvents& events_;
  double seconds_;
  const Simulation& ideal_;
  std::vector<RankState> ranks_;
  std::map<Place, Moment> made_;  ///< ends of passes, by who needs what they made
  std::vector<std::vector<IdleSpan>> spans_;
};

}  // namespace

std::vector<std::vector<IdleSpan>> idle_spans(const Schedule& schedule, const StageEvents& events,
                                              double seconds, const Simulation& ideal) {
  return Step(schedule, events, seconds, ideal).run();
}

}  // namespace trireme::plan
