// Models in stages: few micro-batches against many, and schedules against each other.
#include <fmt/format.h>

#include "trireme/bench/targets/families.h"

namespace trireme::bench {
namespace {

Target pipeline(Target target) {
  target.pipelined = true;
  target.on_gpu.emplace_back("train.global_batch=32");
  return on_language_model(std::move(target));
}

/// `few`: the fewest micro-batches that the schedule takes on two ranks and that are not a special case.
Target micro_batches(const std::string& schedule, int few, const std::string& name,
                     std::vector<std::string> aliases) {
  const auto arm = [&](const std::string& called, int count) {
    return Arm{
        .name = called, .keys = {fmt::format("pipeline.micro_batches={}", count)}, .owed = Owed::kSameLosses};
  };
  return pipeline(
      {.name = name,
       .chapters = {kTrainLab},
       .aliases = std::move(aliases),
       .summary = fmt::format("The schedule {} with {} micro-batches, against 16", schedule, few),
       .workload = {"pipeline.schedule=" + schedule},
       .declared = {.difference = "pipeline.micro_batches",
                    .expected = "more micro-batches leave ranks idle for less time",
                    .arms = {arm(fmt::format("{} micro-batches", few), few), arm("16 micro-batches", 16)}},
       .documents = {.difference = "pipeline.micro_batches",
                     .expected = "optimized leaves ranks idle for less time",
                     .arms = {arm("baseline", few), arm("optimized", 16)}},
       .ranks = few == 2 ? std::vector<int64_t>{2, 4} : std::vector<int64_t>{2}});
}

Target schedules() {
  const auto arm = [](const std::string& schedule) {
    return Arm{.name = schedule, .keys = {"pipeline.schedule=" + schedule}, .owed = Owed::kSameLosses};
  };
  return pipeline(
      {.name = "pipeline",
       .chapters = {kMeshes},
       .aliases = {"pipeline_schedules"},
       .summary = "Pipeline schedules against GPipe, with the same micro-batches",
       .workload = {"pipeline.micro_batches=8"},
       .declared = {.difference = "pipeline.schedule",
                    .expected = "1f1b needs less memory; zb_h1 and dualpipe_v are idle for less time",
                    .arms = {arm("gpipe"), arm("1f1b"), arm("zb_h1"), arm("dualpipe_v")}},
       .ranks = {2}});
}

}  // namespace

std::vector<Target> pipeline_targets() {
  return {micro_batches("gpipe", 2, "pipeline_gpipe", {"gpipe", "pipeline_gpipe_multigpu"}),
          micro_batches("1f1b", 2, "pipeline_1f1b", {"1f1b", "pipeline_1f1b_multigpu"}),
          micro_batches("dualpipe", 4, "pipeline_dualpipe", {"dualpipe", "pipeline_dualpipe_multigpu"}),
          micro_batches("dualpipe_v", 4, "pipeline_dualpipev",
                        {"dualpipev", "dualpipe_v", "pipeline_dualpipe_v", "pipeline_dualpipev_multigpu"}),
          schedules()};
}

}  // namespace trireme::bench
