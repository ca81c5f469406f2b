#pragma once
// Files with the rates of a machine: measured by the worker, read by plans and benches.
#include <cstdint>
#include <string>

#include "trireme/base/env.h"
#include "trireme/plan/rates.h"

namespace trireme::cli {

/// Measures the rates of `ranks` ranks at once into `file`, in at most about two minutes. Returns the exit
/// code of the ranks.
int measure_rates(const std::string& file, plan::Device device, int64_t ranks, const Environment& environment,
                  const std::string& command);

/// The rates in `file`. Throws ConfigError where they are those of another kind of device.
plan::Rates read_rates(const std::string& file, plan::Device device);

}  // namespace trireme::cli
