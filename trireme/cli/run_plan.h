#pragma once
// The plan of a training run, made before anything starts: device, ranks, mesh, batch and model-state memory.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline.h"
#include "trireme/report/cost_table.h"

namespace trireme::cli {

/// Memory that ranks of this host share: of one GPU, or of the host for all of its CPU ranks.
struct DeviceMemory {
  int64_t bytes = 0;  ///< 0: not known
  int64_t ranks = 1;  ///< that share it
};

struct RunPlan {
  plan::Device device = plan::Device::kCpu;  ///< kCpu or kCuda
  int64_t ranks = 1;
  plan::MeshShape mesh;
  plan::BatchPlan batch;
  plan::ModelFacts facts;                   ///< of the whole model
  plan::ModelFacts held;                    ///< of what the largest rank along tp has of it
  plan::RankBytes needed;                   ///< of the rank that needs most
  std::vector<plan::RankBytes> by_pp_rank;  ///< one where there is no pipeline
  std::optional<plan::PipelinePlan> pipeline;
  DeviceMemory there;
  plan::Config config = {};             ///< as the run will have it: memory.recompute is never kAuto
  std::vector<std::string> notes = {};  ///< as plan::ResolvedConfig has them

  /// Whether ranks cannot run whatever else is true, and whether they fit as predicted.
  bool cannot_fit() const { return exceeds(needed.least()); }
  bool fits() const { return !exceeds(needed.peak()); }
  bool exceeds(int64_t rank_bytes) const { return there.bytes > 0 && rank_bytes > there.bytes / there.ranks; }
};

/// `device` of the config with kAuto resolved for this machine. Throws EnvironmentError when cuda is asked
/// for and the build or the machine has none.
plan::Device choose_device(plan::Device device, int gpus);

/// `asked` ranks (-n), else one a GPU, else 2. Throws ConfigError below 1 or above the number of GPUs.
int64_t choose_ranks(std::optional<int64_t> asked, plan::Device device, int gpus);

/// Throws ConfigError where the device cannot compute in the config's dtype.
void check_device(const plan::Config& config, plan::Device device);

/// Mesh, batch equation, facts and memory. Throws ConfigError when they do not fit each other.
RunPlan plan_run(const plan::Config& config, plan::Device device, int64_t ranks, DeviceMemory there = {});

/// "does not fit: 59.8 GiB a rank x 2 on 23.0 GiB", "fits: ..."; empty where the machine's memory is not
/// known.
std::string fit_text(const RunPlan& plan, int64_t rank_bytes);

/// The predicted cost of `policy` for the run that `plan` describes; nothing of it is measured.
report::CostRow predicted_cost(const RunPlan& plan, const plan::Policy& policy);

/// A table in at most `columns` (report::Table).
std::string to_text(const RunPlan& plan, const plan::Config& config, int64_t columns = 0);
std::string to_json(const RunPlan& plan, const plan::Config& config);

}  // namespace trireme::cli
