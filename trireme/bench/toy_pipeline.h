#pragma once
// A pipeline of random layers, whose ways to run are timed beside each other.
#include <cstdint>
#include <memory>
#include <vector>

#include "trireme/bench/pipeline_runs.h"
#include "trireme/comm/mesh.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/pipeline_report.h"

namespace trireme::bench {

/// One way to run, and what it took.
class ToyPipelineArm {
 public:
  ToyPipelineArm(const std::shared_ptr<comm::World>& world, const ToyPipelineRun& run,
                 const ToyPipelineMode& mode);

  /// Collective. Returns the loss.
  double step(const ToyPipelineRun& run, int64_t number, bool measured);

  ToyPipelineMode mode;
  std::vector<double> losses, samples_ms;  ///< of measured steps; ms of the slowest rank
  const plan::PipelineReport& median_report() const;

 private:
  std::shared_ptr<comm::World> world_;
  comm::Mesh mesh_;
  plan::Schedule simulated_;
  std::unique_ptr<parallel::Pipeline> pipeline_;
  parallel::Pipeline::Optimizers optimizers_;
  std::vector<plan::PipelineReport> reports_;
};

}  // namespace trireme::bench
