// ZeRO and FSDP: what each rank keeps of the model, and what that saves and costs.
#include <fmt/format.h>

#include "trireme/bench/targets/families.h"

namespace trireme::bench {
namespace {

Target zero(int stage, const std::string& kept) {
  return on_language_model(
      {.name = fmt::format("zero{}", stage),
       .chapters = {kTrainLab},
       .aliases = {fmt::format("zero{}_multigpu", stage)},
       .summary = fmt::format("ZeRO-{}: each rank keeps its part of {}", stage, kept),
       .workload = {},
       .declared = {.difference = "parallel.policy",
                    .expected = "less memory a rank; no less time",
                    .arms = {{.name = "ddp", .keys = {"parallel.policy=ddp"}},
                             {.name = fmt::format("zero{}", stage),
                              .keys = {fmt::format("parallel.policy=zero{}", stage)}}}},
       .documents = {.difference = "parallel.policy, and micro-batches of 2 in place of a rank's whole batch",
                     .expected = "optimized needs less memory a rank",
                     .arms = {{.name = "baseline", .keys = {"parallel.policy=ddp"}},
                              {.name = "optimized",
                               .keys = {fmt::format("parallel.policy=zero{}", stage), "train.micro_batch=2"},
                               .owed = Owed::kSameLosses}}}});
}

Target fsdp() {
  return on_language_model(
      {.name = "fsdp",
       .chapters = {kTrainLab, kSharding},
       .aliases = {"train_fsdp", "fsdp2", "train_fsdp2", "fsdp_multigpu", "fsdp2_multigpu", "fsdp_basics",
                   "fsdp_transformer"},
       .summary = "FSDP that keeps whole parameters from forward to backward, against one that gathers them "
                  "again",
       .workload = {"parallel.policy=fsdp"},
       .declared = {.difference = "parallel.sharding",
                    .expected = "shard_grad_op takes less time and more memory",
                    .arms = {{.name = "full_shard", .keys = {"parallel.sharding=full_shard"}},
                             {.name = "shard_grad_op", .keys = {"parallel.sharding=shard_grad_op"}}}},
       .documents = {
           .difference = "micro-batch 1 against 2, blocks computed again, and on GPUs FP8",
           .expected = "optimized needs less memory a rank",
           .arms = {
               {.name = "baseline", .keys = {"parallel.sharding=full_shard", "train.micro_batch=1"}},
               {.name = "optimized",
                .keys = {"parallel.sharding=full_shard", "train.micro_batch=2", "memory.recompute=block"},
                .owed = Owed::kSameLosses},
               {.name = "optimized, FP8",
                .keys = {"parallel.sharding=full_shard", "train.micro_batch=2", "memory.recompute=block",
                         "precision.fp8=tensorwise"},
                .owed = Owed::kNearLosses,
                .bound = 0.05,
                .needs_gpu = true}}}});
}

Target fsdp_fp8() {
  return on_language_model({.name = "fsdp_fp8",
                            .chapters = {kShardingLab, kTrainLab},
                            .aliases = {"fsdp2_fp8"},
                            .summary = "FSDP in bf16, against the same with matrix products in FP8",
                            .workload = {"parallel.policy=fsdp", "precision.compute=bf16"},
                            .declared = {.difference = "precision.fp8",
                                         .expected = "FP8 takes less time where matrices are large",
                                         .arms = {{.name = "bf16", .keys = {"precision.fp8=off"}},
                                                  {.name = "fp8",
                                                   .keys = {"precision.fp8=tensorwise"},
                                                   .owed = Owed::kNearLosses,
                                                   .bound = 0.05}}},
                            .needs_gpu = true,
                            .on_cpu_with = "precision.fp8_fallback=emulate"});
}

Target memory_ladder() {
  const auto rung = [](const std::string& name, std::vector<std::string> keys) {
    return Arm{.name = name, .keys = std::move(keys)};
  };
  return on_language_model(
      {.name = "memory_ladder",
       .chapters = {kShardingLab},
       .aliases = {"fsdp2_standard", "ladder", "recompute"},
       .summary = "FSDP that computes more and more again in backward, to keep less",
       .workload = {"parallel.policy=fsdp"},
       .declared = {.difference = "memory.recompute",
                    .expected = "each rung needs less memory and more time than the one before",
                    .arms = {rung("keeps all", {"memory.recompute=none"}),
                             rung("cheap", {"memory.recompute=cheap"}),
                             rung("all_but_attention", {"memory.recompute=all_but_attention"}),
                             rung("block", {"memory.recompute=block"})}},
       .documents = {.difference = "blocks computed again, then FP8, one after the other",
                     .expected = "each arm needs less memory than the one before",
                     .arms = {rung("baseline", {"memory.recompute=none"}),
                              rung("+ checkpointing", {"memory.recompute=block"}),
                              {.name = "+ FP8",
                               .keys = {"memory.recompute=block", "precision.fp8=tensorwise"},
                               .owed = Owed::kNearLosses,
                               .bound = 0.05,
                               .needs_gpu = true}}}});
}

Target hybrid_sharding() {
  return on_language_model(
      {.name = "hybrid_sharding",
       .chapters = {kAdvanced, kSharding},
       .aliases = {"hsdp"},
       .summary = "FSDP over all ranks, against two copies that are sharded over half of them each",
       .workload = {"parallel.policy=fsdp"},
       .declared = {.difference = "parallel.sharding",
                    .expected = "hybrid_shard takes less time where half of the ranks have faster links, and "
                                "more memory",
                    .arms = {{.name = "full_shard", .keys = {"parallel.sharding=full_shard"}},
                             {.name = "hybrid_shard",
                              .keys = {"parallel.sharding=hybrid_shard", "parallel.dp_replicate=2"}}}},
       .ranks = {4, 8}});
}

}  // namespace

std::vector<Target> sharded_targets() {
  return {zero(1, "the optimizer state"),
          zero(2, "gradients and optimizer state"),
          zero(3, "parameters, gradients and optimizer state"),
          fsdp(),
          fsdp_fp8(),
          memory_ladder(),
          hybrid_sharding()};
}

}  // namespace trireme::bench
