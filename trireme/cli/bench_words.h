#pragma once
// The words that published scripts and launchers give a benchmark, in our keys.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/bench/target.h"

namespace trireme::cli {

/// The changes that flags of --target-extra-arg make to one target.
struct TargetWords {
  std::vector<std::string> keys = {};  ///< "section.key=value"
  std::string mode = {};               ///< declared or documents; empty: not said
  std::string only = {};               ///< the one arm that is trained: baseline or optimized
  std::optional<int64_t> steps = {};   ///< measured ones
  std::optional<int64_t> ranks = {};
  std::optional<int64_t> accumulation = {};        ///< micro-batches that a rank takes in a step
  std::optional<int64_t> last_micro_batches = {};  ///< of the last arm of a pipeline
  std::optional<int64_t> last_micro_batch_size = {};
  bool summary = false;
};

/// The words of `flags` for `target`. Throws ConfigError for a flag that there is not, with the nearest, and
/// for one that has no key here.
TargetWords words_of(const bench::Target& target, const std::string& flags);

/// By target, of 'TARGET="--flag value"' of which each names one of `chosen`, several flags or a whole
/// chapter. Throws ConfigError.
std::map<const bench::Target*, TargetWords> extra_words(const std::vector<std::string>& arguments,
                                                        const std::vector<bench::Choice>& chosen);

/// The ranks and variables that a launcher is asked for.
struct LaunchWords {
  std::optional<int64_t> ranks = {};
  std::vector<std::string> environment = {};  ///< "KEY=VALUE", as given for ranks
};

/// Reads --torchrun-env, KEY=VALUE or the KEY of a variable that is set, and of TORCHRUN_ARGS. Throws
/// ConfigError for what cannot be honoured here.
LaunchWords launch_words(const std::vector<std::string>& variables, const Environment& environment);

}  // namespace trireme::cli
