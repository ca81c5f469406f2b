#include "trireme/plan/unit_buffers.h"

#include <algorithm>

#include "trireme/base/nf4_format.h"
#include "trireme/plan/config.h"
#include "trireme/plan/optimizer.h"

namespace trireme::plan {
namespace {

constexpr int64_t kExchangedElement = 4;

}  // namespace

EngineSetting engine_setting(const Config& config, const MeshShape& ranks, int64_t accumulation,
                             Device device) {
  const ParallelConfig& parallel = config.parallel;
  const MeshShape mesh = ranks.of_engine();
  return {.policy = resolve_policy(parallel, mesh),
          .mesh = mesh,
          .compute_bytes = bytes_of(config.precision.compute),
          .wire_bytes = bytes_of(wire_dtype(config.precision)),
          .wire_as_computed = wire_dtype(config.precision) == config.precision.compute,
          .moments = state_bytes_of_block(config.optim),
          .accumulation = accumulation,
          .reduces_once = parallel.reduce_when == ReduceWhen::kOncePerStep,
          .sums_in_fp32 = config.precision.accumulate == SumDtype::kFp32,
          .hook = parallel.comm_hook,
          .reduction = config.comm.reduction,
          .prefetch = parallel.prefetch,
          .beside = parallel.overlap && device == Device::kCuda,
          .use_from = parallel.bucket_mib > 0.0 ? UseFrom::kBuckets : UseFrom::kRunUnit,
          .device = device};
}

std::optional<Fp8Unit> fp8_unit(const UnitSpec& unit) {
  if (!unit.fp8_block || std::ranges::any_of(unit.params, &ParamSpec::frozen)) return {};
  Fp8Unit fp8;
  for (const ParamSpec& param : unit.params) fp8.rest += param.layer ? 0 : param.numel();
  return fp8;
}

std::optional<Nf4Unit> nf4_unit(const UnitSpec& unit) {
  if (std::ranges::none_of(unit.params, &ParamSpec::nf4)) return {};
  Nf4Unit nf4;
  for (const ParamSpec& param : unit.params) nf4.rest += param.frozen && !param.nf4 ? param.numel() : 0;
  return nf4;
}

UnitBuffers::UnitBuffers(int64_t numel, const EngineSetting& setting, const std::optional<Fp8Unit>& fp8,
                         int64_t frozen, const std::optional<Nf4Unit>& nf4)
    : whole(numel),
      shard(numel / setting.shard_ranks()),
      updated(setting.policy.shard_optimizer ? shard : whole),
      parameters_come_and_go(setting.gathers()),
      keeps_shard(setting.shards_parameters()),
      master_in_parameters(setting.compute_bytes == kFp32Bytes && !keeps_shard),
      master_is_shard(setting.compute_bytes == kFp32Bytes && keeps_shard),
      gradients_stay(!setting.policy.shard_gradients || setting.alone() || setting.stays),
      // fp32 gradients that stay whole are reduced in place, where nothing is added to them afterwards.
      reduced_in_gradients(setting.alone() || (setting.compute_bytes == kFp32Bytes &&
                                               !setting.policy.shard_gradients && setting.reduces_once)),
      reduced_comes_and_goes(!reduced_in_gradients && setting.policy.shard_optimizer &&
                             setting.shard_ranks() > 1 && !setting.stays),
      sums_micro_batches_apart(setting.compute_bytes != kFp32Bytes && setting.reduces_once &&
                               setting.sums_in_fp32),
      in_fp8(fp8 && parameters_come_and_go),
      whole_bytes(in_fp8 ? whole : setting.compute_bytes * whole),
      shard_bytes(in_fp8 ? shard + setting.compute_bytes * fp8->rest : setting.compute_bytes * shard),
      exchanged_bytes(in_fp8 ? kExchangedElement * setting.shard_ranks() * fp8->exchanged() : 0),
      frozen_bytes(nf4 ? nf4_bytes(frozen) : setting.compute_bytes * frozen),
      frozen_shard_bytes(frozen_bytes / setting.shard_ranks()) {
  if (nf4) (keeps_shard ? frozen_shard_bytes : frozen_bytes) += setting.compute_bytes * nf4->rest;
}

}  // namespace trireme::plan
