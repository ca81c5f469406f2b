#pragma once
// A file of signals as the plan of a model's training: who has which layers, what crosses each boundary, and
// what the workers of a stage exchange.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/cli/run_plan.h"
#include "trireme/plan/held_parameters.h"
#include "trireme/plan/signals.h"
#include "trireme/plan/step_program.h"

namespace trireme::cli {

/// The workers with one list, a rank of the pipeline.
struct SignalGroup {
  int64_t place = 0;                ///< in Signals::groups
  int64_t worker = 0;               ///< the one whose parameters these are
  std::vector<std::string> stages;  ///< "0: root to transformer.h.1", as plan mesh has them
  std::vector<plan::HeldParameter> params;
  plan::StepProgram program;  ///< of each of its workers
};

struct SignalsView {
  std::string file;
  plan::Signals signals;
  std::string model = {};              ///< the config's name, and how it is cut into stages
  std::vector<std::string> keys = {};  ///< of a config for the mesh that the file is; empty: it is none
  plan::BatchPlan batch = {};
  int64_t seq_len = 0;
  std::vector<SignalGroup> groups = {};  ///< all, or the one of a worker; none where the file has no stages
};

/// Tables in at most `columns`.
std::string to_text(const SignalsView& view, int64_t columns);
nlohmann::ordered_json to_json(const SignalsView& view);

}  // namespace trireme::cli
