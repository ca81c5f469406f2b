#pragma once
// What is to be measured of pipelines; the front command asks for it, and ranks do it.
#include <cstdint>
#include <string>

namespace trireme::bench {

/// Steps of a model in stages, under one schedule after the other.
struct PipelineRun {
  int64_t micro_batches = 8;
  int64_t micro_batch_size = 1;  ///< sequences
  int64_t chunks = 2;            ///< stages a rank, of schedules that leave it open
  int64_t warmup = 3, steps = 6;
  int64_t study = 0;  ///< ranks whose stages run on one; 0: every rank has its own
};

/// One way to run the toy pipeline.
struct ToyPipelineMode {
  std::string name;  ///< baseline or optimized
  int64_t micro_batches = 1;
  int64_t window = 1;  ///< micro-batches in flight at most
  bool blocking = false;
};

/// Layers of random numbers, trained for a few steps.
struct ToyPipelineRun {
  std::string schedule;  ///< as plan::ScheduleName has it
  int64_t ranks = 2, batch_size = 64, width = 500, depth = 6, steps = 6, seed = 42;
  double lr = 1e-4;
  bool study = false;  ///< all stages on one rank
};

}  // namespace trireme::bench
