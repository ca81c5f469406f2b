#pragma once
// The collectives by which the ranks of an engine gather a unit and sum its gradients, with the bytes that a
// rank sends in them.
#include <cstdint>
#include <vector>

#include "trireme/plan/step_program.h"
#include "trireme/plan/unit_buffers.h"

namespace trireme::plan {

/// An all-gather of `bytes` in all.
Transfer gather_transfer(int64_t bytes, int64_t ranks);

/// A unit's gradients are summed over the ranks, and between replicas; none with local SGD. Hooks that start
/// late send them as they are until then.
std::vector<Transfer> reduction_transfers(const EngineSetting& setting, const UnitBuffers& memory);

}  // namespace trireme::plan
