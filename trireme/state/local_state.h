#pragma once
// Moments of ranks that train alone between averages of their weights (local SGD): each rank has its own,
// saved as "optimizer.local.RANK.KIND.PARAMETER". Private to state/*.cpp.
#include <cstdint>
#include <string>

#include "trireme/comm/group.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/state/state_reader.h"

namespace trireme::state {

std::string local_name(int64_t dp_rank, const std::string& kind, const std::string& param);
/// Lets a file have these moments of a parameter; returns whether it has any.
bool allow_local_state(StateReader& reader, const std::string& kind, const plan::FlatEntry& entry);
/// A region of this rank's moments, (region.numel()) fp32 on the CPU; when another number of ranks
/// saved the file, the mean over all of these. Undefined when the file has none.
at::Tensor read_local_state(const StateReader& reader, const comm::Group& ranks, const std::string& kind,
                            const plan::FlatEntry& entry, const plan::Region& region);

}  // namespace trireme::state
