#include "trireme/plan/saved_copy.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/optimizer.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/power_sgd.h"

namespace trireme::plan {
namespace {

constexpr int64_t kInt64Bytes = 8;

/// Ranks that hold different elements, and those that hold the same.
struct Sharing {
  int64_t shards = 1, replicas = 1;
};

Sharing sharing_of(const Config& config, const MeshShape& mesh) {
  const Policy policy = resolve_policy(config.parallel, mesh);
  const int64_t shards = policy.shard_optimizer ? policy.shard_ranks(mesh) : 1;
  return {shards, mesh.dp_size() / shards};
}

/// The first replica writes what does not divide.
int64_t first_share(int64_t numel, const Sharing& sharing) {
  return (numel + sharing.replicas - 1) / sharing.replicas;
}

/// The bytes that hooks which begin later keep beside the residual, which the first rank writes: how many
/// steps they have made, and factors that the next step starts from.
int64_t of_late_start(const FlatLayout& unit, const Config& config) {
  const CommHook hook = config.parallel.comm_hook;
  if (hook != CommHook::kTopK && hook != CommHook::kPowerSgd) return 0;
  int64_t bytes = 0;
  for (const FlatEntry& entry : unit.entries())
    if (entry.part.copy == 0 && entry.part.first_element() == 0) bytes += saved_piece_bytes(kInt64Bytes);
  if (hook == CommHook::kTopK) return bytes;
  for (const FactoredMatrix& matrix :
       factored_matrices(unit, config.parallel.hook_rank, bytes_of(wire_dtype(config.precision))))
    bytes += saved_piece_bytes(kFp32Bytes * matrix.columns * matrix.rank);
  return bytes;
}

/// Adds a unit to what each shard copies.
void add_unit(const FlatLayout& unit, const Config& config, const Sharing& sharing,
              std::vector<int64_t>& by_shard) {
  const int64_t moments = std::ssize(state_of(config.optim));
  // Ranks of local SGD have moments of their own.
  const bool local = config.parallel.comm_hook == CommHook::kLocalSgd;
  const Sharing of_moments = local ? Sharing() : sharing;
  const int64_t size = unit.numel() / sharing.shards;
  for (const FlatEntry& entry : unit.entries()) {
    if (entry.part.copy > 0) continue;  // its stage does not save it
    for (int64_t shard = entry.offset / size; shard * size < entry.end(); ++shard) {
      const Range part = intersect({shard * size, (shard + 1) * size}, {entry.offset, entry.end()});
      int64_t& bytes = by_shard[static_cast<size_t>(shard)];
      bytes += saved_piece_bytes(kFp32Bytes * first_share(part.size(), sharing)) +
               moments * saved_piece_bytes(kFp32Bytes * first_share(part.size(), of_moments));
      if (part.begin == entry.offset && entry.part.first_element() == 0)
        bytes += saved_piece_bytes(kInt64Bytes);
    }
    if (!keeps_residual(config.parallel.comm_hook)) continue;
    for (int64_t& bytes : by_shard) bytes += saved_piece_bytes(kFp32Bytes * entry.numel);
  }
  by_shard.front() += of_late_start(unit, config);
}

/// The stages of a rank of a pipeline.
void add_stages(const Config& config, const ModelFacts& facts, const MeshShape& mesh, int64_t pp_rank,
                const PipelinePlan& pipeline, const Sharing& sharing, std::vector<int64_t>& by_shard) {
  for (const int64_t stage : pipeline.schedule.stages_of(pp_rank)) {
    const UnitRange range = units_of_stage(pipeline.split, stage);
    for (const UnitSpec& unit : stage_units(config.model, facts, range))
      add_unit(flat_layout(unit, mesh.dp_size()), config, sharing, by_shard);
  }
}

}  // namespace

bool keeps_residual(CommHook hook) {
  return hook == CommHook::kInt8 || hook == CommHook::kTopK || hook == CommHook::kPowerSgd;
}

bool saves_in_place(const Config& config, Device device) {
  return device == Device::kCpu && !config.checkpoint.async && config.optim.state == OptimState::kFp32;
}

int64_t saved_copy_bytes(const Config& config, const ModelFacts& facts, const MeshShape& mesh,
                         int64_t pp_rank) {
  const bool staged = config.checkpoint.every > 0 && config.parallel.pp > 1;
  return saved_copy_bytes(config, facts, mesh,
                          staged ? plan_pipeline(config, plan_batch(config, mesh)) : PipelinePlan(), pp_rank);
}

int64_t saved_copy_bytes(const Config& config, const ModelFacts& facts, const MeshShape& ranks,
                         const PipelinePlan& pipeline, int64_t pp_rank) {
  if (config.checkpoint.every == 0) return 0;
  const MeshShape mesh = ranks.of_engine();
  const Sharing sharing = sharing_of(config, mesh);
  std::vector<int64_t> by_shard(static_cast<size_t>(sharing.shards), 0);
  if (config.parallel.pp > 1) {
    add_stages(config, facts, mesh, pp_rank, pipeline, sharing, by_shard);
  } else {
    const std::vector<UnitSpec> units = engine_units(config, facts);
    for (const UnitSpec& unit : units) add_unit(flat_layout(unit, mesh.dp_size()), config, sharing, by_shard);
  }
  return *std::ranges::max_element(by_shard);
}

}  // namespace trireme::plan
