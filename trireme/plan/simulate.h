#pragma once
// A pipeline schedule in time: when each pass of each rank runs for given costs, when ranks idle, and how
// many activations are in flight.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/schedule.h"

namespace trireme::plan {

/// In any unit of time and bytes. One entry a stage, or one for all of them.
struct PassCosts {
  std::vector<double> forward = {1.0};
  std::vector<double> backward_input = {1.0};
  std::vector<double> backward_weight = {1.0};
  double transfer = 0.0;                         ///< of one message: latency, and bytes over bandwidth
  std::vector<double> activation_bytes = {1.0};  ///< of a micro-batch, from forward to backward
  /// Bytes of a micro-batch from the backward pass for the input to that for the weights: more than
  /// activation_bytes where activations are computed again. Empty: as many.
  std::vector<double> between_halves_bytes = {};
  double memory_limit = 0.0;  ///< bytes of activations a rank; 0: none
  /// Passes that overlap (StagePass::with_next) begin together and take this share of their sum; 0: one runs
  /// after the other.
  double overlapped_share = 0.0;
};

struct TimedPass {
  StagePass pass;
  double begin = 0.0, end = 0.0;
};

struct RankTimeline {
  std::vector<TimedPass> passes;
  double busy = 0.0;
  double first = 0.0, last = 0.0;  ///< begin of the first and end of the last pass
  double peak_bytes = 0.0;         ///< of activations
};

struct Simulation {
  std::vector<RankTimeline> ranks;
  double makespan = 0.0;
  /// Time in which the busiest rank had nothing to do.
  double bubble() const;
  /// The share of all ranks' time in which they computed.
  double efficiency() const;
};

/// The bytes by which a pass changes the activations that its rank holds, once it is over; a forward pass
/// holds its own from its begin.
double growth(const StagePass& pass, const PassCosts& costs);

/// Ranks run their passes in order, each as soon as its rank is free and what it needs has arrived. Throws
/// ConfigError that names the first pass that is missing, comes twice, is on the wrong rank, comes before
/// what it needs on its own rank, waits for ever, or overruns the memory limit.
Simulation simulate(const Schedule& schedule, const PassCosts& costs = {});

/// The passes of all ranks on a single one, in the order in which simulate() ends them: a pipeline for study
/// where there is one device. If there are two copies of the model, one is left.
Schedule on_one_rank(const Schedule& schedule);

/// Keeps the order of forward and backward passes, and puts passes for the weights where a rank would wait
/// under these costs: for the next input to arrive, or for memory to be given back.
Schedule fill_weights(const Schedule& without_weights, const PassCosts& costs);

/// A schedule for these costs: every rank runs what is ready, backward before forward before weights, and
/// starts no forward pass that would overrun costs.memory_limit. Throws ConfigError when a single micro-batch
/// does.
Schedule greedy_schedule(const PipelineShape& shape, Placement placement, const PassCosts& costs);

}  // namespace trireme::plan
