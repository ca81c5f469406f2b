// The cost of saving, in the steps of a run.
#include "trireme/bench/targets/families.h"

namespace trireme::bench {

std::vector<Target> checkpoint_targets() {
  return {on_language_model(
      {.name = "checkpoint",
       .chapters = {kSharding},
       .aliases = {"fsdp_checkpoint", "checkpoint_cost"},
       .summary = "A run that saves nothing, against one that saves every tenth step",
       .workload = {"parallel.policy=fsdp", "checkpoint.keep=1"},
       .declared = {.difference = "checkpoint.every and checkpoint.async",
                    .expected = "saving in the background costs less than waiting for the disk",
                    .arms = {{.name = "saves nothing", .keys = {"checkpoint.every=0"}},
                             {.name = "in the background",
                              .keys = {"checkpoint.every=10", "checkpoint.async=true"}},
                             {.name = "waits", .keys = {"checkpoint.every=10", "checkpoint.async=false"}}}},
       .statistic = Statistic::kMean})};
}

}  // namespace trireme::bench
