#pragma once
// Bytes that a run costs a rank, counted from its step program; the engine's own counters are compared with
// it.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {

/// Bytes that one rank holds between steps; activations and gathered units come on top.
struct StateBytes {
  int64_t parameters = 0;  ///< compute dtype
  int64_t gradients = 0;   ///< as accumulated and as reduced
  int64_t optimizer = 0;   ///< moments, and the fp32 master where parameters are of another dtype
  int64_t total() const { return parameters + gradients + optimizer; }
  StateBytes& operator+=(const StateBytes& other) {
    parameters += other.parameters;
    gradients += other.gradients;
    optimizer += other.optimizer;
    return *this;
  }
  bool operator==(const StateBytes&) const = default;
};

/// What `program` keeps from step to step, the sum that reductions leave for the update included.
StateBytes state_bytes(const StepProgram& program);

/// What units in flight hold on top of model state at the moment at which they hold most: parameters that are
/// gathered for use, gradients that are not reduced yet, sums of earlier micro-batches.
int64_t gathered_bytes(const StepProgram& program);

/// What a process of ours takes whatever its model is: libraries on a CPU, and what their first use takes; on
/// a GPU the driver's context and libraries, which torch's allocator knows nothing of.
int64_t process_baseline(Device device);

/// What one of `ranks` ranks of a run needs in its device's memory.
struct RankBytes {
  StateBytes state;
  int64_t gathered = 0;
  /// Kept for backward by a micro-batch, but for logits; in a pipeline by all that are under way at once.
  int64_t activations = 0;
  int64_t boundaries = 0;  ///< buffers for what stages receive
  int64_t logits = 0;
  int64_t baseline = 0;
  /// The copy that saves are written from, in the host's memory (saved_copy.h); 0: the run saves nothing.
  int64_t saved_copy = 0;
  /// What it takes of the host's memory where that is not the device's: a GPU's is pinned, and no part of
  /// what follows.
  int64_t pinned_copy = 0;
  /// Whatever else is true: state and its copy, or state and activations, without sums of gradients, which
  /// may not be there when activations are at their most. The largest number where it has none, and so below.
  int64_t least() const;
  /// All of it at once.
  int64_t peak() const;
};
/// `device` is kCpu or kCuda. Of the ranks of a pipeline the one that needs most. Throws ConfigError when
/// ranks, mesh and batch do not fit each other.
RankBytes rank_bytes(const Config& config, int64_t ranks, Device device);
/// The same of each rank of a pipeline; one entry where there is none. memory.recompute=auto counts as what
/// settle_recompute() makes of it.
std::vector<RankBytes> bytes_by_pp_rank(const Config& config, int64_t ranks, Device device);
/// The same of what was worked out already: `program` is that of config_program().
RankBytes rank_bytes(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                     const StepProgram& program, Device device, int64_t pp_rank = 0);

/// The step of a data-parallel rank of a run, in a pipeline of its rank `pp_rank`: `setting` is the engine's,
/// of `config` or with another policy. Throws ConfigError where its bytes are beyond 64 bits.
StepProgram config_program(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                           const EngineSetting& setting, int64_t pp_rank = 0);

/// For a run on `ranks` ranks whose device is full: what takes memory, as predicted, and which settings to
/// change, in the order of what they cost; each with the peak of a rank that is predicted with those before
/// it.
std::string memory_advice(const Config& config, int64_t ranks, Device device);

/// Kept for backward by a micro-batch of `tokens`.
int64_t activation_bytes(const ModelFacts& facts, int64_t tokens);

}  // namespace trireme::plan
