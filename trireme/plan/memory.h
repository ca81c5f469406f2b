#pragma once
// Bytes that a run costs a rank, counted from its step program; the engine's own counters are compared with
// these numbers.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/step_peak.h"
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

/// Bytes that `program` keeps from step to step, including the reduced gradients that wait for the update.
StateBytes state_bytes(const StepProgram& program);

/// Bytes that a worker process of a run of so many ranks takes whatever its model: on a CPU the libraries and
/// what their first use allocates; on a GPU the driver's context and libraries, which torch's allocator does
/// not count.
int64_t process_baseline(Device device, int64_t ranks);

/// Bytes that one of `ranks` ranks of a run needs in its device's memory.
struct RankBytes {
  StateBytes state;
  int64_t gathered = 0;
  /// Kept for backward by a micro-batch, without logits; in a pipeline by all micro-batches that are in
  /// flight at once.
  int64_t activations = 0;
  int64_t boundaries = 0;  ///< buffers for tensors that stages receive
  int64_t logits = 0;
  /// Held by the block that goes backward: what it computes again, and gradients of attention's scores.
  int64_t in_backward = 0;
  int64_t decoded = 0;    ///< weights of a product that are held in four bits, while it reads them
  int64_t exchanged = 0;  ///< in which other GPUs along tp read this one's activations
  int64_t baseline = 0;
  /// The copy that saves are written from, in the host's memory (saved_copy.h); 0: the run saves nothing.
  int64_t saved_copy = 0;
  /// Pinned host memory that the copy takes beside a GPU; 0 on a CPU. Where it is not 0, least() and peak()
  /// leave the copy out.
  int64_t pinned_copy = 0;
  /// A lower bound on what the rank needs: the larger of state with its copy, and of parameters, optimizer
  /// state, activations and boundaries, without gradients, which may not exist yet when activations are at
  /// their peak. The largest int64_t where the sum does not fit, as for peak().
  int64_t least() const;
  /// Bytes at the moment of a step at which it holds most. State, gathered, activations and logits
  /// above are the most of each, which may be at different moments.
  StepPeak step = {};
  /// The peak of a step, what is exchanged, the process and a copy on the device. The largest int64_t where
  /// the sum does not fit.
  int64_t peak() const;
};
/// The bytes of the rank that needs most: ranks of a pipeline differ. `device` is kCpu or kCuda. Throws
/// ConfigError when ranks, mesh and batch do not fit each other.
RankBytes rank_bytes(const Config& config, int64_t ranks, Device device);
/// The bytes of each rank of a pipeline; one entry without a pipeline. memory.recompute=auto counts as
/// settle_recompute() resolves it.
std::vector<RankBytes> bytes_by_pp_rank(const Config& config, int64_t ranks, Device device);
/// As above, given `pipeline`, the result of plan_pipeline(), which is ignored without a pipeline.
std::vector<RankBytes> bytes_by_pp_rank(const Config& config, int64_t ranks, Device device,
                                        const PipelinePlan& pipeline);
/// The bytes of one rank from facts, batch and `program` (config_program()) that are known already.
RankBytes rank_bytes(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                     const StepProgram& program, Device device, int64_t pp_rank = 0);
/// As above, given `pipeline`, the result of plan_pipeline(), which is ignored without a pipeline.
RankBytes rank_bytes(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                     const StepProgram& program, Device device, const PipelinePlan& pipeline,
                     int64_t pp_rank);

/// The step programs of the ranks of a pipeline, or of a data-parallel rank; those of train.step_program
/// where config names some. `setting`: the engine's, of `config` or with another policy. Throws ConfigError
/// when their bytes do not fit 64 bits, and as given_programs().
std::vector<StepProgram> config_programs(const Config& config, const ModelFacts& facts,
                                         const BatchPlan& batch, const EngineSetting& setting);
/// As above, given `pipeline`, the result of plan_pipeline(), which is ignored without a pipeline.
std::vector<StepProgram> config_programs(const Config& config, const ModelFacts& facts,
                                         const BatchPlan& batch, const EngineSetting& setting,
                                         const PipelinePlan& pipeline);
/// That of a data-parallel rank of a run; in a pipeline, of one with the pipeline rank `pp_rank`.
/// `setting`: the engine's, of `config` or with another policy. Throws ConfigError when its bytes do not fit
/// 64 bits.
StepProgram config_program(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                           const EngineSetting& setting, int64_t pp_rank = 0);

/// Advice for a run on `ranks` ranks whose device is full: the predicted memory by kind, and the settings to
/// change, cheapest first, each with the predicted peak of a rank after it and the changes before it.
std::string memory_advice(const Config& config, int64_t ranks, Device device);

/// Bytes that a micro-batch of `tokens` tokens keeps for backward on `device`, kCpu or kCuda.
int64_t activation_bytes(const ModelFacts& facts, int64_t tokens, Device device = Device::kCpu);

}  // namespace trireme::plan
