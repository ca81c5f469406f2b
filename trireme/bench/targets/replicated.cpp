// Every rank holds the whole model: what changes is how gradients travel.
#include "trireme/bench/targets/families.h"

namespace trireme::bench {
namespace {

Target ddp() {
  return on_language_model(
      {.name = "ddp",
       .chapters = {kTrainLab, kAdvanced, kBenchmarks},
       .aliases = {"communication_overlap", "ddp_multigpu", "distributed_benchmarks"},
       .summary = "DDP whose reductions overlap with the backward pass, against one that waits for each",
       .workload = {},
       .declared = {.difference = "parallel.overlap",
                    .expected = "overlap takes less time on GPUs; on CPUs the key changes nothing",
                    .arms = {{.name = "waits", .keys = {"parallel.overlap=false"}},
                             {.name = "overlaps", .keys = {"parallel.overlap=true"}}}},
       .documents = {
           .difference = "buckets of 25 MiB that are waited for, against buckets of 50 MiB that "
                         "overlap, and micro-batches of 2 in place of a rank's whole batch",
           .expected = "optimized takes less time",
           .arms = {{.name = "baseline", .keys = {"parallel.overlap=false", "parallel.bucket_mib=25"}},
                    {.name = "optimized",
                     .keys = {"parallel.overlap=true", "parallel.bucket_mib=50", "train.micro_batch=2"},
                     .owed = Owed::kSameLosses}}}});
}

Target ddp_flash() {
  return on_language_model(
      {.name = "ddp_flash",
       .chapters = {kTrainLab},
       .aliases = {"ddp_flash_multigpu"},
       .summary = "DDP whose attention is fused, against products and a softmax that keep every score",
       .workload = {},
       .declared = {.difference = "model.attention",
                    .expected =
                        "fused attention takes less time and memory, the more so the longer sequences are",
                    .arms = {{.name = "eager", .keys = {"model.attention=eager"}},
                             {.name = "fused", .keys = {"model.attention=auto"}, .owed = Owed::kSameLosses}}},
       .documents = {
           .difference = "model.attention, and buckets of 50 MiB in place of 25",
           .expected = "optimized takes less time",
           .arms = {{.name = "baseline", .keys = {"model.attention=eager", "parallel.bucket_mib=25"}},
                    {.name = "optimized",
                     .keys = {"model.attention=auto", "parallel.bucket_mib=50"},
                     .owed = Owed::kSameLosses}}}});
}

Target ddp_buckets() {
  return on_language_model(
      {.name = "ddp_buckets",
       .chapters = {kTrainLab},
       .summary = "The size of DDP's gradient buckets: one per block, small ones, and one for the model",
       .workload = {},
       .on_cpu = {},
       .declared = {.difference = "parallel.bucket_mib",
                    .expected = "one bucket per block takes the least time, since it is full when a block's "
                                "backward ends",
                    .arms = {{.name = "25 MiB", .keys = {"parallel.bucket_mib=25"}},
                             {.name = "1 MiB", .keys = {"parallel.bucket_mib=1"}},
                             {.name = "per block", .keys = {"parallel.bucket_mib=0"}}}},
       .documents = {
           .difference = "buckets of 25 MiB, against buckets of 50 MiB whose gradients travel in fp16",
           .expected = "optimized takes less time",
           .arms = {{.name = "baseline", .keys = {"parallel.bucket_mib=25"}},
                    {.name = "optimized",
                     .keys = {"parallel.bucket_mib=50", "parallel.comm_hook=fp16"},
                     .owed = Owed::kNearLosses,
                     .bound = 0.01}}}});
}

Target ddp_compression() {
  const auto hook = [](const std::string& name, double bound, std::vector<std::string> more = {}) {
    more.push_back("parallel.comm_hook=" + name);
    return Arm{.name = name, .keys = std::move(more), .owed = Owed::kNearLosses, .bound = bound};
  };
  return on_language_model(
      {.name = "ddp_compression",
       .chapters = {kTrainLab},
       .aliases = {"ddp_compression_int8", "ddp_compression_powersgd", "ddp_compression_multigpu_int8",
                   "ddp_compression_multigpu_powersgd"},
       .summary = "DDP whose gradients are compressed before they travel, by every hook",
       .workload = {},
       .declared = {.difference = "parallel.comm_hook",
                    .expected = "fewer bytes; less time only where the links are slower than the compression",
                    .arms = {{.name = "none", .keys = {"parallel.comm_hook=none"}},
                             hook("fp16", 0.01),
                             hook("int8", 0.02),
                             hook("topk", 0.25, {"parallel.hook_start=2", "parallel.hook_density=0.1"}),
                             hook("powersgd", 0.10, {"parallel.hook_start=2", "parallel.hook_rank=8"})}},
       .documents = {.difference = "parallel.comm_hook",
                     .expected = "optimized sends fewer bytes",
                     .arms = {{.name = "baseline", .keys = {"parallel.comm_hook=none"}},
                              {.name = "optimized",
                               .keys = {"parallel.comm_hook=int8"},
                               .owed = Owed::kNearLosses,
                               .bound = 0.02}}}});
}

Target symmem() {
  return on_language_model(
      {.name = "symmem_training",
       .chapters = {kTrainLab},
       .aliases = {"symmem", "symmem_training_multigpu", "symmetric_memory"},
       .summary = "Ranks that read each other's memory, against ranks that send messages",
       .workload = {},
       .declared = {.difference = "comm.peer_memory",
                    .expected = "peer memory takes less time",
                    .arms = {{.name = "messages", .keys = {"comm.peer_memory=false"}},
                             {.name = "peer memory", .keys = {"comm.peer_memory=true"}}}},
       .documents = {.difference = "comm.peer_memory",
                     .expected = "optimized takes less time",
                     .arms = {{.name = "baseline", .keys = {"comm.peer_memory=false"}},
                              {.name = "optimized", .keys = {"comm.peer_memory=true"}}}}});
}

}  // namespace

std::vector<Target> replicated_targets() {
  return {ddp(), ddp_flash(), ddp_buckets(), ddp_compression(), symmem()};
}

}  // namespace trireme::bench
