#pragma once
// What 'bench run' will do: every target with all of its runs, decided and checked before the first one
// starts.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "trireme/bench/results.h"
#include "trireme/cli/bench_runs.h"
#include "trireme/cli/bench_words.h"

namespace trireme::cli {

/// The options of 'bench run' that decide what is measured.
struct LabOptions {
  std::vector<std::string> targets;   ///< each may be several, separated by commas
  std::string chapter, config, arms;  ///< `arms`: "section.key=a,b" of a config
  std::string mode = "declared", profile = "minimal";
  std::string probe;  ///< rates of the machine for its roof; empty: they are measured
  int64_t iterations = 20, warm_up = 10, blocks = 3;
  std::optional<int64_t> ranks;
  std::vector<std::string> extra, variables;
  std::vector<std::string> overrides;  ///< keys that all arms have, "device=cpu" among them
};

/// The options as JSON, and back: what is kept in results.json for --continue.
nlohmann::json to_json(const LabOptions& options);
LabOptions lab_options_from(const nlohmann::json& json);

/// Steps of a run that is traced: behind as many that are not, so that memory has been taken and libraries
/// have chosen their kernels.
inline constexpr int64_t kStepsBeforeTrace = 10, kTracedSteps = 4;

/// The work of the kernels of an arm in a step, as bench::Depth::kRoofline asks.
struct PlannedWork {
  std::vector<bench::CountedWork> counted = {};
  std::string why_not = {};  ///< none is counted
  std::string dtype = {};    ///< of computation, as rates list it
  bool fp8 = false;          ///< products are in FP8, some or all
};

/// Ranks that rates are measured for: on a CPU they share cores and memory, GPUs do not.
struct ProbedRanks {
  int64_t ranks = 0, threads = 0;  ///< threads of a rank; 0: as the environment has it
  auto operator<=>(const ProbedRanks&) const = default;
};

/// One target with its runs.
struct PlannedTarget {
  bench::TargetResult result;  ///< without samples; skipped ones say why
  std::string config;          ///< of all runs; empty: none
  std::vector<BenchRun> arms;
  std::vector<int64_t> arm_ranks;
  std::optional<BenchRun> twin;  ///< on one rank
  std::string why_no_twin;
  int64_t twin_steps = 0;
  double limit_s = 0.0;                ///< of one run
  double estimated_s = 0.0;            ///< of all runs that are no profile, roughly
  double profile_s = 0.0;              ///< of the traced runs, roughly; 0: none is made
  std::vector<PlannedWork> work = {};  ///< by arm; empty: not asked for
  double all_s() const { return estimated_s + profile_s; }
};

struct LabPlan {
  std::string device;                    ///< "cpu" or "cuda"
  std::vector<std::string> environment;  ///< "KEY=VALUE", given for ranks
  std::vector<PlannedTarget> targets;
  bench::Depth depth = bench::Depth::kMinimal;
  std::string probe = {};  ///< as LabOptions has it
  /// The ranks whose rates the arm is held against: on GPUs those of the largest arm of all.
  ProbedRanks probed(const PlannedTarget& target, size_t arm) const;
  double profile_s() const;    ///< of traced runs and measured rates
  double estimated_s() const;  ///< of everything
};

/// Throws ConfigError for anything that would be refused later. `front`'s overrides are not looked at.
LabPlan plan_lab(const LabOptions& options, const Front& front);

/// The front for the ranks of a target: its environment with what was given, and on CPUs with as many threads
/// a rank as the largest arm leaves cores.
Front front_for(const PlannedTarget& target, const LabPlan& plan, const Front& front);

}  // namespace trireme::cli
