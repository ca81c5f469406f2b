#pragma once
// What holds for a step program as a whole, whatever the order of its actions: verify() checks it beside what
// each action needs when it runs.
#include "trireme/plan/step_program.h"

namespace trireme::plan {

/// Throws LogicError naming the first action, unit or buffer that breaks one of these laws. Every micro-batch
/// goes forward and back through a unit equally often, back in the reverse order. The gradients of each are
/// added up or reduced once, and the last sum has all of them. An update follows all reductions, since the
/// norm needs them. Units exchange the same messages in each micro-batch. Actions run in the lane and pass of
/// their kind. Transfers send what makes a unit whole, and buffers have the bytes of their units.
void check_step_laws(const StepProgram& program);

}  // namespace trireme::plan
