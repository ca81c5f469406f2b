#pragma once
// Moments of ranks that train alone between averages of their weights (local SGD): each rank has its own,
// saved as "optimizer.local.RANK.KIND.PARAMETER". Private to parallel/*.cpp.
#include <cstdint>
#include <string>

#include "trireme/comm/group.h"
#include "trireme/parallel/state_reader.h"
#include "trireme/plan/flat_layout.h"

namespace trireme::parallel {

std::string local_name(int64_t dp_rank, const std::string& kind, const std::string& param);
/// Looks for them in a file, which need not have any; returns whether it has.
bool allow_local_state(StateReader& reader, const std::string& kind, const plan::FlatEntry& entry);
/// Elements `range` of this rank's, (range.size()) on the CPU: where another number of ranks has saved, the
/// mean of all. Undefined where the file has none.
at::Tensor read_local_state(const StateReader& reader, const comm::Group& ranks, const std::string& kind,
                            const plan::FlatEntry& entry, const plan::Range& range);

}  // namespace trireme::parallel
