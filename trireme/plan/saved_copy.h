#pragma once
// The copy of its part of a checkpoint that a rank makes in host memory between two steps, from which a
// thread writes while training goes on.
#include <cstdint>

#include "trireme/plan/config.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline.h"

namespace trireme::plan {

/// Bytes that each piece of the copy begins at a multiple of.
inline constexpr int64_t kSavedAlignment = 64;

/// Bytes of a piece of `bytes` with its padding.
constexpr int64_t saved_piece_bytes(int64_t bytes) {
  return (bytes + kSavedAlignment - 1) / kSavedAlignment * kSavedAlignment;
}

/// Whether `hook` keeps what it did not send for later steps (error feedback).
bool keeps_residual(CommHook hook);

/// Whether saves are written from the state itself, without a copy: training waits for them, and the state is
/// in the host's memory as it is saved.
bool saves_in_place(const Config& config, Device device);

/// Bytes of the largest copy of a data-parallel rank, in a pipeline among the ranks with `pp_rank`:
/// parameters in fp32, the optimizer's state and its number of updates, shared by the ranks that hold the
/// same, and what a hook of this rank may owe; without PowerSGD's factors and other buffers. 0 when
/// checkpoint.every is 0. The memory is held from the first save on, pinned memory from the beginning.
int64_t saved_copy_bytes(const Config& config, const ModelFacts& facts, const MeshShape& mesh,
                         int64_t pp_rank = 0);
/// As above, given `pipeline`, the result of plan_pipeline(), which is ignored without a pipeline.
int64_t saved_copy_bytes(const Config& config, const ModelFacts& facts, const MeshShape& mesh,
                         const PipelinePlan& pipeline, int64_t pp_rank);

/// Host memory that pinned memory is taken in multiples of (kernels::PinnedMemory).
inline constexpr int64_t kPinnedPage = int64_t{2} << 20;

/// The host memory that a pinned copy of so many bytes takes.
constexpr int64_t pinned_bytes(int64_t bytes) {
  return (bytes + kPinnedPage - 1) / kPinnedPage * kPinnedPage;
}

}  // namespace trireme::plan
