#pragma once
// One call of a group: what errors, the progress board and the device watch talk about.
#include <cstdint>
#include <string_view>

namespace trireme::comm {

struct Operation {
  std::string_view name;   ///< "all_gather"; a literal
  int64_t sequence = 0;    ///< counts the group's operations from 1, equal on all of its ranks
  std::string_view group;  ///< lives as long as the group
};

}  // namespace trireme::comm
