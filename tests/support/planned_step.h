#pragma once
// The step that is planned for units of a model under a setting of the engine.
#include <vector>

#include "trireme/plan/step_program.h"

namespace trireme::test {

inline plan::StepProgram planned_step(const std::vector<plan::UnitSpec>& units,
                                      const plan::EngineSetting& setting,
                                      const std::vector<int64_t>& activation_bytes = {}) {
  const std::vector<plan::ProgramUnit> program_units = plan::program_units(units, setting, activation_bytes);
  return plan::step_program(program_units, setting, plan::declared_order(program_units, setting.use_from));
}

}  // namespace trireme::test
