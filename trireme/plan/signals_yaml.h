#pragma once
// The entries of a file of signals, each for itself. Private to plan/signals*.cpp.
#include <string>
#include <vector>

#include "trireme/plan/signals.h"

namespace trireme::plan {

/// Entries in the order of the text, as it has them. Throws ConfigError with line and column for what is no
/// entry.
std::vector<Signal> read_entries(const std::string& text, const std::string& name);

}  // namespace trireme::plan
