#pragma once
// Bytes that a data-parallel policy costs: what a rank holds between steps, and what it sends in one. Exact
// for the engine of parallel/, padding included; the engine's own counters are compared with it.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/policy.h"

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

struct EngineSetting {
  Policy policy;
  MeshShape mesh;
  int64_t compute_bytes = 4;     ///< of a parameter: 4 (fp32) or 2 (bf16)
  int64_t wire_bytes = 4;        ///< of a gradient in flight
  bool wire_as_computed = true;  ///< gradients travel in the dtype of computation
  int64_t moments = 2;           ///< fp32 numbers of optimizer state an element: those of its record
  int64_t accumulation = 1;      ///< micro-batches a step
  bool reduces_once = true;      ///< a step; else after every micro-batch
  bool compresses = false;       ///< there is a communication hook
};

/// As config says. Throws ConfigError as resolve_policy().
EngineSetting engine_setting(const Config& config, const MeshShape& mesh, int64_t accumulation);

StateBytes engine_state(const std::vector<UnitSpec>& units, const EngineSetting& setting);

/// Sent by one rank in one step, without hooks: reductions, and gathers of gradients or parameters.
int64_t engine_wire_bytes(const std::vector<UnitSpec>& units, const EngineSetting& setting);

/// What units in flight hold on top of model state: parameters that are gathered for use, and gradients that
/// are not reduced yet. On a GPU the next unit's gradients are computed while those of one are reduced.
int64_t gathered_bytes(const std::vector<UnitSpec>& units, const EngineSetting& setting, int64_t prefetch,
                       Device device);

/// What a process of ours takes whatever its model is: libraries on a CPU, and what their first use takes; on
/// a GPU the driver's context and libraries, which torch's allocator knows nothing of.
int64_t process_baseline(Device device);

/// What one of `ranks` ranks of a run needs in its device's memory.
struct RankBytes {
  StateBytes state;
  int64_t gathered = 0;
  int64_t activations = 0;  ///< kept for backward by a micro-batch, but for logits
  int64_t logits = 0;
  int64_t baseline = 0;
  /// Whatever else is true: state and activations, without sums of gradients, which may not be there when
  /// activations are at their most. The largest number where it has none, and so below.
  int64_t least() const;
  /// All of it at once.
  int64_t peak() const;
};
/// `device` is kCpu or kCuda. Throws ConfigError when ranks, mesh and batch do not fit each other.
RankBytes rank_bytes(const Config& config, int64_t ranks, Device device);
/// The same of what was worked out already.
RankBytes rank_bytes(const Config& config, const ModelFacts& facts, const BatchPlan& batch,
                     const EngineSetting& setting, Device device);

/// For a run on `ranks` ranks whose device is full: what takes memory, as predicted, and which setting to
/// change first.
std::string memory_advice(const Config& config, int64_t ranks);

/// Kept for backward by a micro-batch of `tokens`.
int64_t activation_bytes(const ModelFacts& facts, int64_t tokens);

}  // namespace trireme::plan
