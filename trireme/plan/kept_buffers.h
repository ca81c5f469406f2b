#pragma once
// The buffers of a step program beside those that come and go with its actions: parameters, masters,
// optimizer state, gradients that stay, and the sums of gradients, which live on into the next step.
#include <vector>

#include "trireme/plan/step_program.h"
#include "trireme/plan/unit_buffers.h"

namespace trireme::plan {

/// Adds them to a program whose actions are complete; `units`: how a rank lays out each.
void add_kept_buffers(StepProgram& program, const std::vector<UnitBuffers>& units,
                      const EngineSetting& setting);

}  // namespace trireme::plan
