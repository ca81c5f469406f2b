#pragma once
// Making the runs of a bench one after the other, with results.json on the disk after each of them.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "trireme/bench/results.h"
#include "trireme/cli/bench_plan.h"

namespace trireme::cli {

/// Results without samples: where, when and with what.
bench::Results new_results(const LabOptions& options, const LabPlan& plan, const Front& front);

/// Samples of an earlier session go into `results`, whose targets must be the same: runs that ended well
/// stay, those that failed are made again. Throws ConfigError for results of another machine or program.
void take_over(bench::Results& results, const bench::Results& earlier);

class BenchSession {
 public:
  /// Writes results.json at once, so that a folder that cannot be written to is refused before any run.
  /// Throws EnvironmentError.
  BenchSession(const LabPlan& plan, Front& front, std::string folder, bench::Results results);

  /// Makes all runs that are missing. Returns the code of a signal that ended it, else 0.
  int run();

  const bench::Results& results() const { return results_; }

 private:
  int run_target(size_t index);
  int run_slot(const PlannedTarget& planned, bench::TargetResult& target, const bench::Slot& slot,
               Front& front);
  int run_twin(const PlannedTarget& planned, bench::TargetResult& target, Front& front);
  int run_proofs(const PlannedTarget& planned, bench::TargetResult& target, Front& front);
  int run_profiles(const PlannedTarget& planned, bench::TargetResult& target, Front& front);
  int add_roof(const PlannedTarget& planned, bench::ArmProfile& profile, const Front& front);
  void write() const;

  const LabPlan& plan_;
  Front& front_;
  std::string folder_;
  bench::Results results_;
  /// Runs on one rank of this session, by all of their keys: targets of one workload share one.
  std::vector<std::pair<std::string, bench::Sample>> twins_;
  std::map<ProbedRanks, std::string> why_no_rates_;  ///< of those that could not be measured
};

}  // namespace trireme::cli
