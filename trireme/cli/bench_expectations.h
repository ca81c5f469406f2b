#pragma once
// Accepted results, for 'bench run --check'.
#include <string>

#include "trireme/bench/expectations.h"
#include "trireme/cli/front.h"

namespace trireme::cli {

/// Throws before anything is measured where --check could not compare: ConfigError for a file that is named
/// and not there, DataError for a damaged one.
void read_expectations_early(const std::string& file, const Front& front);

/// Holds `results` against what was accepted in `file` (empty: the usual one) for this hardware, with a table
/// on stderr. Returns 8 where an arm has become slower or has lost of its ratio, 3 where nothing was accepted
/// for any of them, else 0.
int check_expectations(const bench::Results& results, const std::string& file, const Front& front);

}  // namespace trireme::cli
