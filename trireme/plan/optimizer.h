#pragma once
// What is particular to an optimizer, one record each. A new one is an enumerator in choices.h, its record
// in optimizer.cpp, and its update with a line in the table of optim/optimizer.cpp.
#include <span>
#include <string_view>

#include "trireme/plan/choices.h"

namespace trireme::plan {

struct OptimizerRecord {
  OptimizerName name;
  /// fp32 numbers kept for each element of a parameter, zero at first: one tensor a name.
  std::span<const std::string_view> state;
  /// Config keys that it reads and others do not.
  std::span<const std::string_view> keys;
};

const OptimizerRecord& record_of(OptimizerName name);

}  // namespace trireme::plan
