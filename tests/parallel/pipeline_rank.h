#pragma once
// A rank of a pipeline of the model of pipeline_net.h, for tests that take its steps one by one.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tests/parallel/pipeline_net.h"

namespace trireme::test {

/// A rank of a pipeline, ready for steps.
struct Rank {
  Rank(const std::shared_ptr<comm::World>& world, const PipelineRun& run,
       const std::function<void(std::vector<parallel::Stage>&)>& change = {})
      : mesh(mesh_of(world, run)), schedule(schedule_of(run)) {
    modules = stages_of(schedule, mesh.pp_rank, run, stages);
    if (change) change(stages);
    pipeline = std::make_unique<parallel::Pipeline>(schedule, stages, squared_error, mesh,
                                                    options_of(run, schedule));
  }
  at::Tensor step(int64_t rows = kRows) {
    return pipeline->forward_backward(batch(3000, 0).narrow(0, 0, rows), batch(4000, 0).narrow(0, 0, rows));
  }

  comm::Mesh mesh;
  plan::Schedule schedule;
  std::vector<parallel::Stage> stages;
  std::vector<std::shared_ptr<BlockStage>> modules;
  std::unique_ptr<parallel::Pipeline> pipeline;
};

}  // namespace trireme::test
