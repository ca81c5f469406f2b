#pragma once
// Every way to arrange a number of ranks in a mesh, with the memory that each needs, the bytes that it sends
// and the time that it loses: why one and not another. Counted from the step programs that ranks would run.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {

/// Bytes that a rank sends in a step, by the ranks that get them.
struct AxisBytes {
  int64_t data = 0;    ///< parameters and gradients, along dp_replicate, dp_shard and cp
  int64_t tp = 0;      ///< activations, and gradients of copies
  int64_t cp = 0;      ///< what attention takes and gives
  int64_t stages = 0;  ///< messages along pp
  /// The largest int64_t where the sum does not fit.
  int64_t total() const;
  bool operator==(const AxisBytes&) const = default;
};

/// Those of a step of `micro_batches`, of which `program` may show fewer (StepProgram::kMicroBatchesShown).
AxisBytes bytes_by_axis(const StepProgram& program, int64_t micro_batches);

/// What a comparison of meshes assumes of the ranks and of the links between them.
struct RankSpeed {
  double flops = 0.0;          ///< a second
  double bytes = 0.0;          ///< that a rank sends in a second, within a host
  double bytes_between = 0.0;  ///< and between hosts
  int64_t host_ranks = 1;      ///< of one host
};
/// Rates of one H100 or H200 in bf16 with NVLink, and 50 GB/s a GPU between hosts of eight; or of a few
/// cores.
RankSpeed usual_speed(Device device);

struct MeshChoice {
  MeshShape mesh;
  std::string obstacle = {};  ///< why the run would be refused; empty: it would not, and the rest is known
  BatchPlan batch = {};
  CpKind cp_kind = CpKind::kUlysses;  ///< with more than one rank along cp
  RankBytes needed = {};              ///< of the rank that needs most
  AxisBytes sent = {};                ///< of the rank that sends most
  double idle = 0.0;  ///< share of the ranks' time that the schedule of the pipeline leaves idle
  /// The seconds of a step, at the assumed speed. What backward computes again (repeated_flops()) counts as
  /// computing.
  double computing_s = 0.0, idle_s = 0.0, sending_s = 0.0;

  bool works() const { return obstacle.empty(); }
  double seconds() const { return computing_s + idle_s + sending_s; }
  /// The share of a step in which a rank does not compute, as if nothing were sent beside computation.
  double lost() const { return seconds() > 0.0 ? 1.0 - computing_s / seconds() : 0.0; }
  bool fits(int64_t rank_memory) const { return rank_memory == 0 || needed.peak() <= rank_memory; }
};

/// The meshes of `ranks` ranks over pp, the ranks of data, cp and tp, with all else as `config` says; its
/// dp_replicate is kept, and dp_shard has the other ranks of data. Those that fit into `rank_memory` bytes a
/// rank (0: not known) come first, then those that do not, then those that are refused; among each by lost().
/// `device` is kCpu or kCuda.
std::vector<MeshChoice> mesh_choices(const Config& config, int64_t ranks, Device device,
                                     const RankSpeed& speed, int64_t rank_memory = 0);

}  // namespace trireme::plan
