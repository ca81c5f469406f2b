#pragma once
// Accepted results, for 'bench run --check'.
#include <string>

#include "trireme/bench/expectations.h"
#include "trireme/cli/front.h"

namespace trireme::cli {

/// Holds `results` against what was accepted in `file` (empty: the usual one) for this hardware, with a table
/// on stderr. Returns 8 where an arm has become slower or has lost of its ratio, else 0.
int check_expectations(const bench::Results& results, const std::string& file, const Front& front);

}  // namespace trireme::cli
