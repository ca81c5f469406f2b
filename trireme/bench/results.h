#pragma once
// results.json of a bench: everything that was measured, and all that its reports, comparisons and exports
// are made from.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/bench/profile.h"
#include "trireme/bench/sample.h"
#include "trireme/bench/target.h"
#include "trireme/bench/verdict.h"
#include "trireme/bench/verify.h"

namespace trireme::bench {

enum class State {
  kMeasured,  ///< and verified
  kBlocked,   ///< measured, but a check failed: there are no ratios
  kFailed,    ///< a run crashed, or could not be started
  kSkipped,   ///< it does not run here
  kPartial    ///< not all of its runs have been made yet
};
std::string state_text(State state);

struct TargetResult {
  std::string name, mode, summary, difference, expected;
  State state = State::kPartial;
  std::string reason;  ///< why it was skipped or has failed
  int64_t ranks = 0, steps = 0, warm_up = 0, blocks = 0;
  int64_t threads = 0;  ///< a rank, that were set; 0: as the environment has it
  Statistic statistic = Statistic::kMedian;
  bool shows_memory = false;  ///< a line compares what ranks hold
  std::vector<Arm> arms;
  std::vector<std::vector<std::string>> keys;  ///< of each arm, all that were given
  std::vector<Sample> samples;                 ///< in the order in which they were made
  std::vector<Sample> twins;                   ///< a run on one rank, or none
  /// Short runs of all arms with train.deterministic=true, by arm; none where bits do not vary.
  std::vector<Sample> proofs = {};
  std::vector<ArmProfile> profiles = {};  ///< in the order in which they were made; none: not asked for
  std::vector<Check> checks;
};

/// The machine, which two benches must have in common to be compared.
struct Machine {
  std::string hostname, cpu, kernel, device;
  int64_t cores = 0, memory_bytes = 0;
  double load = 0.0;  ///< processes that wanted a core when it began, over a minute

  /// "cpu, AMD EPYC, 2 cores".
  std::string hardware() const;
};

struct Results {
  std::string command, started, version, commit, worker_digest;
  Machine machine;
  std::string profile = "minimal";       ///< a word of kDepthNames
  std::vector<std::string> environment;  ///< "KEY=VALUE", given for the ranks
  nlohmann::json request;                ///< the options, with which --continue goes on
  bool complete = false;                 ///< all targets have come to an end
  std::vector<TargetResult> targets;
};

/// The scores of a target's arms.
std::vector<Score> score(const TargetResult& target);

/// Whether arms that owe the same weights came to others because bits of equal runs vary there: then proofs
/// tell.
bool needs_proofs(const TargetResult& target);

/// Judges a target whose runs are all there: checks and state. A profile that could not be taken changes
/// nothing; one with kernels that are faster than the machine was measured to be blocks the target.
void judge(TargetResult& target, const std::string& why_no_twin);

/// 0; 8 where a target is blocked, 1 where one has failed, 3 where all were skipped.
int exit_code(const Results& results);

std::string to_json_text(const Results& results);
/// Throws DataError for a text that to_json_text() did not write; `path` is named.
Results results_from_json(const std::string& text, const std::string& path);
/// results.json in the folder `path`, or the file `path` itself. Throws ConfigError where there is none.
Results read_results(const std::string& path);

}  // namespace trireme::bench
