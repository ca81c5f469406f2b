#include "trireme/plan/held_parameters.h"

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/nf4_format.h"
#include "trireme/base/round_up.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/stage_program.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {
namespace {

/// A part differs from the whole in one dimension at most.
void set_part(HeldParameter& param, const Part& part) {
  param.copies = std::max<int64_t>(1, part.copies);
  const auto differs = std::ranges::mismatch(param.whole, param.held);
  if (differs.in1 == param.whole.end()) return;
  const int64_t dim = differs.in1 - param.whole.begin();
  param.cut = dim;
  const auto place = static_cast<size_t>(dim);
  const bool packed = !part.view.empty();
  if (packed) param.packed = part.view[place];
  const int64_t begin = part.start[place + (packed ? 1 : 0)];
  param.part = {begin, begin + *differs.in2 / param.packed};
}

/// What a rank keeps of `held` elements, of which it has `shard` and updates `updated`.
int64_t bytes_between_steps(const UnitBuffers& unit, const EngineSetting& setting, bool is_matrix,
                            int64_t held, int64_t shard, int64_t updated) {
  int64_t bytes = unit.parameters_come_and_go ? 0 : setting.compute_bytes * held;
  if (unit.keeps_shard) {
    bytes +=
        unit.in_fp8 ? shard + (is_matrix ? 0 : setting.compute_bytes * held) : setting.compute_bytes * shard;
  }
  if (!unit.master_in_parameters && !unit.master_is_shard) bytes += kFp32Bytes * updated;
  return bytes + round_up(updated, FlatLayout::kAlignment) / FlatLayout::kAlignment * setting.moments;
}

HeldParameter held_parameter(const FlatEntry& entry, const UnitSpec& unit, int64_t stage) {
  HeldParameter param{.name = entry.name,
                      .unit = unit.name,
                      .whole = entry.whole_shape(),
                      .held = entry.shape,
                      .stage = stage};
  set_part(param, entry.part);
  return param;
}

/// Parameters that are frozen for good: a rank keeps its shard of them, or all, and updates none.
void add_frozen_parameters(std::vector<HeldParameter>& params, const UnitSpec& unit, int64_t stage,
                           const EngineSetting& setting, int64_t place) {
  const FlatLayout layout = frozen_layout(unit, setting.mesh.dp_size());
  const int64_t size = layout.numel() / setting.shard_ranks(), first = size * (place % setting.shard_ranks());
  const bool is_nf4 = nf4_unit(unit).has_value();
  for (const FlatEntry& entry : layout.entries()) {
    const Range all{entry.offset, entry.end()};
    const int64_t shard = setting.shards_parameters() ? intersect({first, first + size}, all).size() : 0;
    const int64_t whole = setting.gathers() ? 0 : entry.numel;
    const bool stays = is_nf4 && !entry.nf4;
    params.push_back(held_parameter(entry, unit, stage));
    params.back().bytes = entry.nf4 ? nf4_bytes(round_up(shard, kNf4Block) + round_up(whole, kNf4Block))
                                    : setting.compute_bytes * (stays ? entry.numel : shard + whole);
  }
}

void add_unit_parameters(std::vector<HeldParameter>& params, const UnitSpec& unit, int64_t stage,
                         const EngineSetting& setting, int64_t place) {
  const FlatLayout layout = flat_layout(unit, setting.mesh.dp_size());
  const UnitBuffers memory(layout.numel(), setting, fp8_unit(unit));
  const int64_t first = memory.shard * (place % setting.shard_ranks());
  const Range shard{first, first + memory.shard},
      updated = memory.updated == memory.whole ? Range{0, memory.whole} : shard;
  for (const FlatEntry& entry : layout.entries()) {
    HeldParameter& param = params.emplace_back(held_parameter(entry, unit, stage));
    const Range all{entry.offset, entry.end()}, mine = intersect(updated, all);
    if (mine.size() > 0) param.updated = {mine.begin - entry.offset, mine.end - entry.offset};
    param.bytes = bytes_between_steps(memory, setting, entry.layer.has_value(), entry.numel,
                                      intersect(shard, all).size(), mine.size());
  }
  add_frozen_parameters(params, unit, stage, setting, place);
}

}  // namespace

int64_t place_in_engine(const MeshShape& mesh, const EngineSetting& setting, int64_t rank) {
  const MeshShape engine = mesh.of_engine();
  const int64_t place = engine.dp_rank(rank), pp = mesh.size(Axis::kPp);
  // Where two ranks of a pipeline have a copy of each stage, those of its second half follow.
  const bool is_second = setting.mesh.dp_size() > engine.dp_size() &&
                         2 * mesh.coordinates(rank)[static_cast<size_t>(Axis::kPp)] >= pp;
  return place + (is_second ? engine.dp_size() : 0);
}

std::vector<HeldParameter> held_parameters(const Config& config, const MeshShape& mesh,
                                           const PipelinePlan& pipeline, Device device, int64_t rank) {
  const ModelFacts facts =
      describe(config.model, config.data.seq_len, config.precision, config.memory, tensor_split(mesh, rank));
  EngineSetting setting = engine_setting(config, mesh, /*accumulation=*/1, device);
  std::vector<HeldParameter> params;
  if (config.parallel.pp == 1) {
    for (const UnitSpec& unit : engine_units(config, facts))
      add_unit_parameters(params, unit, 0, setting, place_in_engine(mesh, setting, rank));
    return params;
  }
  setting = setting_in_stages(setting, pipeline.schedule);
  const int64_t pp_rank = mesh.coordinates(rank)[static_cast<size_t>(Axis::kPp)];
  for (const int64_t stage : pipeline.schedule.stages_of(pp_rank)) {
    for (const UnitSpec& unit : stage_units(config.model, facts, units_of_stage(pipeline.split, stage)))
      add_unit_parameters(params, unit, stage, setting, place_in_engine(mesh, setting, rank));
  }
  return params;
}

}  // namespace trireme::plan
