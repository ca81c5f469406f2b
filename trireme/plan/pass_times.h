#pragma once
// Shared by the simulator and the makers of schedules in time: costs of passes, when their inputs are there,
// and what a rank holds. Private to plan/*.cpp.
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "trireme/plan/simulate.h"

namespace trireme::plan {

inline constexpr double kNever = std::numeric_limits<double>::infinity();

double of_stage(const std::vector<double>& values, int64_t stage);
double duration(const StagePass& pass, const PassCosts& costs);
/// The most that a micro-batch ever holds of a stage.
double most_of_stage(int64_t stage, const PassCosts& costs);
/// Whether the costs' limit of memory allows it.
bool fits(double bytes, const PassCosts& costs);
/// Throws ConfigError unless there is one cost for all stages, or one each.
void check_lengths(const Schedule& schedule, const PassCosts& costs);

/// When the inputs of passes are there: ends of forward and backward passes by stage and micro-batch.
class Progress {
 public:
  Progress(const Schedule& schedule, const PassCosts& costs)
      : schedule_(schedule),
        costs_(costs),
        forward_(count(schedule), kNever),
        input_(count(schedule), kNever),
        weight_(count(schedule), kNever) {}

  /// When the pass could begin, if its rank were free; kNever: what it needs has not run.
  double ready(const StagePass& pass) const;
  bool has_run(const StagePass& pass) const;
  void end(const StagePass& pass, double time);

 private:
  static size_t count(const Schedule& schedule) {
    return static_cast<size_t>(schedule.all_stages() * schedule.micro_batches);
  }
  size_t at(int64_t stage, int64_t micro_batch) const {
    return static_cast<size_t>(stage * schedule_.micro_batches + micro_batch);
  }
  double arrival(const std::vector<double>& ends, int64_t from, int64_t to, int64_t micro_batch) const;

  const Schedule& schedule_;
  const PassCosts& costs_;
  std::vector<double> forward_, input_, weight_;
};

/// One rank on its way through time.
class RankClock {
 public:
  double free_at() const { return free_at_; }
  double held() const { return held_; }
  /// Bytes that it holds, and those that backward passes for the input will add.
  double promised() const { return promised_; }
  /// Returns when it ends. Two passes that overlap count their time once.
  double run(const StagePass& pass, double begin, double seconds, const PassCosts& costs);
  RankTimeline take() { return std::move(timeline_); }

 private:
  RankTimeline timeline_;
  double free_at_ = 0.0, held_ = 0.0, promised_ = 0.0;
};

}  // namespace trireme::plan
