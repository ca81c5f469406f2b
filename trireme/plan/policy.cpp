#include "trireme/plan/policy.h"

#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

constexpr int64_t kSame = Policy::kSameRanks, kKept = 1;

constexpr Policy kPolicies[] = {
    // name, sharding, optimizer, gradients, parameters, after forward, hybrid
    {PolicyName::kDdp, Sharding::kAuto, false, false, false, kKept, false,
     "everything replicated; gradients reduced, then gathered"},
    {PolicyName::kZero1, Sharding::kAuto, true, false, false, kKept, false,
     "optimizer state sharded; updated parameters gathered"},
    {PolicyName::kZero2, Sharding::kAuto, true, true, false, kKept, false,
     "zero1, and full gradients freed once reduced"},
    {PolicyName::kZero3, Sharding::kAuto, true, true, true, kSame, false,
     "parameters sharded as well, and gathered for forward and for backward"},
    {PolicyName::kFsdp, Sharding::kFullShard, true, true, true, kSame, false, "the same as zero3"},
    {PolicyName::kFsdp, Sharding::kShardGradOp, true, true, true, kKept, false,
     "full_shard, but parameters stay gathered from forward to backward"},
    {PolicyName::kFsdp, Sharding::kNoShard, false, false, false, kKept, false, "the same as ddp"},
    {PolicyName::kFsdp, Sharding::kHybridShard, true, true, true, kSame, true,
     "full_shard along dp_shard; shards of gradients reduced along dp_replicate"},
    {PolicyName::kFsdp, Sharding::kHybridShardZero2, true, true, true, kKept, true,
     "shard_grad_op along dp_shard; shards of gradients reduced along dp_replicate"},
};

/// parallel.sharding with auto resolved.
Sharding sharding_of(const ParallelConfig& parallel, int64_t dp_replicate) {
  if (parallel.policy != PolicyName::kFsdp || parallel.sharding != Sharding::kAuto) return parallel.sharding;
  return dp_replicate > 1 ? Sharding::kHybridShard : Sharding::kFullShard;
}

void check_axes(const Policy& policy, const MeshShape& mesh) {
  const int64_t dp_replicate = mesh.size(Axis::kDpReplicate), dp_shard = mesh.size(Axis::kDpShard);
  if (policy.hybrid && dp_replicate == 1) {
    throw ConfigError(
        "[plan.policy] {} needs replicas, but the mesh has dp_replicate=1 and dp_shard={}; set "
        "parallel.dp_replicate to a divisor of the ranks, or parallel.sharding=full_shard",
        policy.label(), dp_shard);
  }
  if (!policy.hybrid && dp_replicate > 1 && dp_shard > 1) {
    throw ConfigError(
        "[plan.policy] {} spreads over all data-parallel ranks, but the mesh has dp_replicate={} and "
        "dp_shard={}; set parallel.dp_replicate=1, or parallel.policy=fsdp with "
        "parallel.sharding=hybrid_shard",
        policy.label(), dp_replicate, dp_shard);
  }
}

int64_t reshard_of(const Policy& policy, const ReshardAfterForward& asked, int64_t shard_ranks) {
  using Kind = ReshardAfterForward::Kind;
  if (asked.kind == Kind::kAsPolicy) return policy.reshard_after_forward;
  if (!policy.shard_parameters) {
    throw ConfigError(
        "[plan.policy] parallel.reshard_after_forward={} has no effect with {}, which does not shard "
        "parameters; leave it at auto",
        to_text(asked), policy.label());
  }
  if (asked.kind == Kind::kFree) return kSame;
  if (asked.kind == Kind::kKeep) return kKept;
  if (asked.ranks < 1 || shard_ranks % asked.ranks != 0) {
    throw ConfigError(
        "[plan.policy] parallel.reshard_after_forward={} does not divide the {} ranks that {} shards over; "
        "set it to a divisor, true or false",
        asked.ranks, shard_ranks, policy.label());
  }
  return asked.ranks == shard_ranks ? kSame : asked.ranks;
}

}  // namespace

std::string Policy::label() const {
  return sharding == Sharding::kAuto ? fmt::format("{}", name) : fmt::format("{}:{}", name, sharding);
}

std::span<const Policy> policies() {
  return kPolicies;
}

const Policy& find_policy(std::string_view label) {
  std::vector<std::string> labels;
  for (const Policy& policy : kPolicies) {
    if (plan::name(policy.name) == label || policy.label() == label) return policy;
    labels.push_back(policy.label());
  }
  const std::string near = nearest_name(label, labels);
  throw ConfigError("[plan.policy] there is no policy '{}'{}; choose one of {}", label,
                    near.empty() ? "" : fmt::format(", did you mean '{}'?", near), join(labels, ", "));
}

const Policy& find_policy(PolicyName name, Sharding sharding) {
  for (const Policy& policy : kPolicies) {
    if (policy.name == name && (sharding == Sharding::kAuto || policy.sharding == sharding)) return policy;
  }
  throw LogicError("[plan.policy] {} has no sharding {}", name, sharding);
}

const Policy& row_of(const ParallelConfig& parallel) {
  if (parallel.policy != PolicyName::kFsdp) return find_policy(parallel.policy);
  return find_policy(parallel.policy, sharding_of(parallel, parallel.dp_replicate));
}

Policy resolve_policy(const ParallelConfig& parallel, const MeshShape& ranks) {
  const MeshShape mesh = ranks.of_engine();
  if (parallel.policy != PolicyName::kFsdp && parallel.sharding != Sharding::kAuto) {
    throw ConfigError(
        "[plan.policy] parallel.sharding={} is for parallel.policy=fsdp, not {}; leave it at auto",
        parallel.sharding, parallel.policy);
  }
  Policy policy = find_policy(parallel.policy, sharding_of(parallel, mesh.size(Axis::kDpReplicate)));
  check_axes(policy, mesh);
  policy.reshard_after_forward = reshard_of(policy, parallel.reshard_after_forward, policy.shard_ranks(mesh));
  return policy;
}

std::string_view hook_obstacle(const Policy& policy, CommHook hook) {
  if (hook == CommHook::kNone) return {};
  if (hook == CommHook::kLocalSgd) {
    if (!policy.hybrid && !policy.shard_optimizer) return {};
    return "each rank trains alone and needs all parameters and optimizer state; use ddp";
  }
  if (!policy.hybrid) return {};
  return "hooks reduce over all data-parallel ranks at once; use a policy without replicas";
}

}  // namespace trireme::plan
