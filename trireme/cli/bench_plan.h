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
  int64_t iterations = 20, warm_up = 10, blocks = 3;
  std::optional<int64_t> ranks;
  std::vector<std::string> extra, variables;
  std::vector<std::string> overrides;  ///< keys that all arms have, "device=cpu" among them
};

/// The options as JSON, and back: what is kept in results.json for --continue.
nlohmann::json to_json(const LabOptions& options);
LabOptions lab_options_from(const nlohmann::json& json);

/// One target with its runs.
struct PlannedTarget {
  bench::TargetResult result;  ///< without samples; skipped ones say why
  std::string config;          ///< of all runs; empty: none
  std::vector<BenchRun> arms;
  std::vector<int64_t> arm_ranks;
  std::optional<BenchRun> twin;  ///< on one rank
  std::string why_no_twin;
  int64_t twin_steps = 0;
  double limit_s = 0.0;      ///< of one run
  double estimated_s = 0.0;  ///< of all runs, roughly
};

struct LabPlan {
  std::string device;                    ///< "cpu" or "cuda"
  std::vector<std::string> environment;  ///< "KEY=VALUE", given for ranks
  std::vector<PlannedTarget> targets;
  double estimated_s() const;
};

/// Throws ConfigError for anything that would be refused later. `front`'s overrides are not looked at.
LabPlan plan_lab(const LabOptions& options, const Front& front);

/// The front for the ranks of a target: its environment with what was given, and on CPUs with as many threads
/// a rank as the largest arm leaves cores.
Front front_for(const PlannedTarget& target, const LabPlan& plan, const Front& front);

}  // namespace trireme::cli
