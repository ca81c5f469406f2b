#pragma once
// Steps of a model in pipeline stages, timed under one schedule after the other.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "trireme/bench/pipeline_runs.h"
#include "trireme/comm/world.h"
#include "trireme/plan/config.h"
#include "trireme/plan/pipeline_report.h"
#include "trireme/plan/schedule.h"

namespace trireme::bench {

/// A schedule, and what a step of it took. Vectors are by rank unless they say otherwise.
struct PipelineTimes {
  std::string schedule;
  std::string refused = {};  ///< why it was not run; empty: it was
  int64_t stages = 0;
  std::vector<double> samples_ms = {};      ///< by step, of the slowest rank
  std::vector<double> recorded_ms = {};     ///< of steps that were recorded, in between
  plan::PipelineReport report = {};         ///< of the recorded step of median length
  std::vector<double> step_bytes = {};      ///< the most that a step has beyond what is there before it
  std::vector<double> peak_bytes = {};      ///< of the GPU's allocator; empty on CPUs
  std::vector<double> sent_bytes = {};      ///< of a step, to other stages
  double makespan = 0.0, efficiency = 0.0;  ///< of the simulator
  double loss = 0.0, grad_norm = 0.0;       ///< of the last step

  double median_ms() const;
  /// The share of a step that recording adds to it.
  double recording_share() const;
};

/// A model's steps on these ranks.
struct PipelineSteps {
  int64_t tokens = 0;  ///< of a step
  std::vector<PipelineTimes> schedules = {};
};

/// `config` says what the model is and how data parallelism shards it; all ranks that data parallelism leaves
/// are stages. A schedule that these ranks cannot run is refused in what is returned. Collective.
PipelineSteps time_schedules(const std::shared_ptr<comm::World>& world, const plan::Config& config,
                             const PipelineRun& run, const std::vector<plan::ScheduleName>& names);

}  // namespace trireme::bench
