#pragma once
// What tells which of two validations is better: train.monitor, for early stopping and for the best weights.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/config.h"
#include "trireme/train/program.h"
#include "trireme/train/validate.h"

namespace trireme::train {

struct Monitor {
  std::string metric = "loss";
  bool higher_is_better = false;

  /// Its value; NaN where the validation lacks it.
  double of(const Validation& found) const;
  /// The larger, the better.
  double score_of(const Validation& found) const { return higher_is_better ? of(found) : -of(found); }
  bool operator==(const Monitor&) const = default;
};

/// The best validation of a run so far.
struct BestValidation {
  int64_t step = 0;    ///< 0: there was none
  double score = 0.0;  ///< as Monitor::score_of() has it
  Monitor monitor = {};
};

/// What train.monitor names, or `otherwise` where it names nothing. Throws ConfigError with the names there
/// are.
Monitor monitor_of(const plan::Config& config, const RunData& data, const std::vector<Metric>& metrics,
                   const std::string& otherwise);

}  // namespace trireme::train
