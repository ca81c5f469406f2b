#pragma once
// A bench in words: a table for a terminal, Markdown, and raw samples as CSV.
#include <string>
#include <vector>

#include "trireme/bench/results.h"

namespace trireme::bench {

/// Titles and cells of a row an arm; what a profile does not ask for is left out.
struct Rows {
  std::vector<std::string> titles;
  std::vector<std::vector<std::string>> cells;
};
Rows rows_of(const Results& results);

/// Titles and cells of a row a kind of kernel of each profile; without profiles no rows.
Rows profile_rows_of(const Results& results);

/// A line a profile: what was traced and where the trace is, or why there is none.
std::vector<std::string> profile_lines(const TargetResult& target);

/// Rows in at most `columns`, a line for each target without ratios that says why, and for each target that
/// was asked for it what its arms hold.
std::string to_text(const Results& results, int64_t columns);

/// report.md: the rows, what is different in each target, its checks, machine and command.
std::string to_markdown(const Results& results);

/// A line a step: target, mode, arm, block, half, step, whether it is behind the warm-up, ms, loss.
std::string to_csv(const Results& results);

/// "1.043 (1.012 to 1.071)"; "-" where there is no ratio.
std::string ratio_text(const Score& score);

/// Facts about where and how it was measured, by name.
std::vector<std::pair<std::string, std::string>> facts_of(const Results& results);

/// How ratios came about, in a sentence or two.
std::string method_text(const Results& results);

}  // namespace trireme::bench
