#pragma once
// The entries of a file of signals, each for itself. Private to plan/signals*.cpp and
// plan/instruction*.cpp.
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/signals.h"

namespace trireme::plan {

/// Whether it can be the name of a signal: a word of letters, digits, '_', '-', '.' and '/', without "//",
/// which begins a comment in programs.
bool is_signal_name(std::string_view text);

/// Entries in the order of the text, as it has them. Throws ConfigError with line and column for what is no
/// entry.
std::vector<Signal> read_entries(const std::string& text, const std::string& name);

}  // namespace trireme::plan
