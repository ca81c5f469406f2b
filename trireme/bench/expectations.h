#pragma once
// The times that were accepted as usual for a machine, and how a later bench stands against them.
#include <string>
#include <vector>

#include "trireme/bench/results.h"

namespace trireme::bench {

/// One arm on one kind of hardware.
struct Expectation {
  std::string hardware, target, mode, arm;
  std::string setup;                      ///< a hash of ranks, threads, steps, keys and workload
  report::Interval ms;                    ///< of a step: its fastest and its slowest run
  report::Interval ratio;                 ///< 0 to 0: of the reference
  std::string accepted, commit, results;  ///< when, of which commit, and from which folder
};

/// All that `path` holds; nothing where there is no such file. Throws DataError.
std::vector<Expectation> read_expectations(const std::string& path);
void write_expectations(const std::string& path, const std::vector<Expectation>& all);

/// The measured targets of `results`, as they would be accepted.
std::vector<Expectation> expectations_of(const Results& results, const std::string& folder,
                                         const std::string& now);

/// `all` with `more` in the place of what was accepted for the same arms on the same hardware.
std::vector<Expectation> merged(std::vector<Expectation> all, const std::vector<Expectation>& more);

/// How an arm compares with what was accepted for it.
struct Held {
  Expectation now;
  Expectation before;
  bool is_known = false;  ///< something was accepted
  bool slower = false;    ///< its fastest run took more than the slowest accepted one
  bool less = false;      ///< its largest ratio is below the smallest accepted one
  bool is_regression() const { return slower || less; }
};
std::vector<Held> hold_against(const std::vector<Expectation>& accepted, const std::vector<Expectation>& now);

}  // namespace trireme::bench
