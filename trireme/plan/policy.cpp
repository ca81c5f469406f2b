#include "trireme/plan/policy.h"

#include <charconv>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

constexpr int64_t kSame = Policy::kSameRanks, kKept = 1;

constexpr Policy kPolicies[] = {
    // name, sharding, optimizer, gradients, parameters, after forward, hybrid
    {"ddp", "", false, false, false, kKept, false, "everything replicated; gradients reduced, then gathered"},
    {"zero1", "", true, false, false, kKept, false, "optimizer state sharded; updated parameters gathered"},
    {"zero2", "", true, true, false, kKept, false, "zero1, and full gradients freed once reduced"},
    {"zero3", "", true, true, true, kSame, false,
     "parameters sharded as well; gathered for forward and for backward"},
    {"fsdp", "full_shard", true, true, true, kSame, false, "the same row as zero3"},
    {"fsdp", "shard_grad_op", true, true, true, kKept, false,
     "full_shard, but parameters stay gathered from forward to backward"},
    {"fsdp", "no_shard", false, false, false, kKept, false, "the same row as ddp"},
    {"fsdp", "hybrid_shard", true, true, true, kSame, true,
     "full_shard along dp_shard; shards of gradients reduced along dp_replicate"},
    {"fsdp", "hybrid_shard_zero2", true, true, true, kKept, true,
     "shard_grad_op along dp_shard; shards of gradients reduced along dp_replicate"},
};

/// parallel.sharding with auto resolved.
std::string_view sharding_of(const ParallelConfig& parallel, const MeshShape& mesh) {
  if (parallel.policy != "fsdp") return "";
  if (parallel.sharding != "auto") return parallel.sharding;
  return mesh.size(Axis::kDpReplicate) > 1 ? "hybrid_shard" : "full_shard";
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

/// parallel.reshard_after_forward: auto, true, false or a number of ranks.
int64_t reshard_of(const Policy& policy, const ParallelConfig& parallel, int64_t shard_ranks) {
  const std::string& asked = parallel.reshard_after_forward;
  if (asked == "auto") return policy.reshard_after_forward;
  if (!policy.shard_parameters) {
    throw ConfigError(
        "[plan.policy] parallel.reshard_after_forward={} means nothing to {}, which keeps parameters whole; "
        "leave it at auto",
        asked, policy.label());
  }
  if (asked == "true") return kSame;
  if (asked == "false") return kKept;
  int64_t ranks = 0;
  const auto end = std::from_chars(asked.data(), asked.data() + asked.size(), ranks);
  const bool number = end.ec == std::errc() && end.ptr == asked.data() + asked.size();
  if (!number || ranks < 1 || shard_ranks % ranks != 0) {
    throw ConfigError(
        "[plan.policy] parallel.reshard_after_forward={} is neither auto, true, false nor a divisor of the "
        "{} ranks that {} shards over",
        asked, shard_ranks, policy.label());
  }
  return ranks == shard_ranks ? kSame : ranks;
}

}  // namespace

std::string Policy::label() const {
  return sharding.empty() ? std::string(name) : fmt::format("{}:{}", name, sharding);
}

std::span<const Policy> policies() {
  return kPolicies;
}

const Policy& find_policy(std::string_view label) {
  std::vector<std::string> labels;
  for (const Policy& policy : kPolicies) {
    if (policy.name == label || policy.label() == label) return policy;
    labels.push_back(policy.label());
  }
  const std::string near = nearest_name(label, labels);
  throw ConfigError("[plan.policy] there is no policy '{}'{}; choose one of {}", label,
                    near.empty() ? "" : fmt::format(", did you mean '{}'?", near), join(labels, ", "));
}

Policy resolve_policy(const ParallelConfig& parallel, const MeshShape& mesh) {
  const std::string_view sharding = sharding_of(parallel, mesh);
  if (parallel.policy != "fsdp" && parallel.sharding != "auto") {
    throw ConfigError(
        "[plan.policy] parallel.sharding={} is for parallel.policy=fsdp, not {}; leave it at auto",
        parallel.sharding, parallel.policy);
  }
  Policy policy = find_policy(sharding.empty() ? parallel.policy : fmt::format("fsdp:{}", sharding));
  check_axes(policy, mesh);
  policy.reshard_after_forward = reshard_of(policy, parallel, policy.shard_ranks(mesh));
  return policy;
}

}  // namespace trireme::plan
