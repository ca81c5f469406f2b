#include "trireme/plan/unit_transfers.h"

namespace trireme::plan {
namespace {

/// Bytes of a unit's whole gradient as it travels.
int64_t gradient_bytes(const EngineSetting& setting, const UnitBuffers& memory) {
  switch (setting.hook) {
    case CommHook::kFp16:
      return 2 * memory.whole;
    case CommHook::kInt8: {
      const int64_t blocks = (memory.shard + kInt8ScaleBlock - 1) / kInt8ScaleBlock;
      return setting.shard_ranks() * blocks * (kInt8ScaleBlock + kFp32Bytes);
    }
    default:
      return setting.wire_bytes * memory.whole;
  }
}

Transfer transfer(Collective collective, int64_t bytes, int64_t ranks) {
  return {collective, ranks, wire_bytes(collective, bytes, ranks)};
}

}  // namespace

Transfer gather_transfer(int64_t bytes, int64_t ranks) {
  return transfer(Collective::kAllGather, bytes, ranks);
}

std::vector<Transfer> reduction_transfers(const EngineSetting& setting, const UnitBuffers& memory) {
  if (setting.reduces_locally()) return {};
  const int64_t shards = setting.shard_ranks(), replicas = setting.replicas();
  if (setting.reduction == Reduction::kBackend && setting.hook == CommHook::kNone) {
    Transfer scatter = transfer(Collective::kReduceScatter, setting.wire_bytes * memory.whole, shards);
    // torch's Gloo reduces all of it on every rank.
    if (setting.device == Device::kCpu) scatter.bytes *= 2;
    return {scatter, transfer(Collective::kAllReduce, setting.wire_bytes * memory.shard, replicas)};
  }
  // fp32 numbers of a shard travel between replicas after they were summed.
  const int64_t shard = kFp32Bytes * memory.shard;
  return {transfer(Collective::kAllToAll, gradient_bytes(setting, memory), shards),
          transfer(Collective::kAllToAll, shard, replicas), gather_transfer(shard, replicas)};
}

}  // namespace trireme::plan
