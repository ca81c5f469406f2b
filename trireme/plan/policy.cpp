#include "trireme/plan/policy.h"

#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

constexpr Policy kPolicies[] = {
    // name    optimizer gradients parameters reshard
    {"ddp", false, false, false, false, "everything replicated; gradients reduced, then gathered"},
    {"zero1", true, false, false, false, "optimizer state sharded; updated parameters gathered"},
    {"zero2", true, true, false, false, "zero1, and full gradients freed once reduced"},
    {"zero3", true, true, true, true, "parameters sharded as well; gathered for forward and for backward"},
    {"fsdp", true, true, true, true, "full shard: the same row as zero3"},
};

}  // namespace

std::span<const Policy> policies() {
  return kPolicies;
}

const Policy& find_policy(std::string_view name) {
  std::vector<std::string> names;
  for (const Policy& policy : kPolicies) {
    if (policy.name == name) return policy;
    names.emplace_back(policy.name);
  }
  const std::string near = nearest_name(name, names);
  throw ConfigError("[plan.policy] parallel.policy '{}' is unknown{}; choose one of {}", name,
                    near.empty() ? "" : fmt::format(", did you mean '{}'?", near), join(names, ", "));
}

}  // namespace trireme::plan
