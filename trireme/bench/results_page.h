#pragma once
// report.html: a bench as one page that needs nothing but itself.
#include <string>

#include "trireme/bench/results.h"

namespace trireme::bench {

/// Rows, bars of ratios with their intervals, checks, raw samples, machine and command.
std::string to_page(const Results& results);

}  // namespace trireme::bench
