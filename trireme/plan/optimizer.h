#pragma once
// The optimizers, one record each. A new one is an enumerator in choices.h, its record in optimizer.cpp, and
// its update with a line in the table of optim/optimizer.cpp.
#include <span>
#include <string_view>
#include <vector>

#include "trireme/plan/choices.h"
#include "trireme/plan/config.h"

namespace trireme::plan {

struct OptimizerRecord {
  OptimizerName name;
  /// Numbers kept for each element of a parameter, zero at first: one tensor a name.
  std::span<const std::string_view> state;
  /// The names in `state` whose numbers are never negative, since they sum squares; formats with few bits
  /// keep their roots.
  std::span<const std::string_view> squares;
  /// Config keys that it reads and others do not.
  std::span<const std::string_view> keys;
};

const OptimizerRecord& record_of(OptimizerName name);

/// The average of a parameter over its updates, which optim.ema asks for.
inline constexpr std::string_view kAverageState = "average";

/// The state of the optimizer's record, then the average if the config asks for one.
std::vector<std::string_view> state_of(const OptimConfig& config);

/// Bytes of state of FlatLayout::kAlignment elements, which may share bytes in formats with fewer bits than
/// fp32. Averages are in fp32.
int64_t state_bytes_of_block(const OptimConfig& config);

}  // namespace trireme::plan
