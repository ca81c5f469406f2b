// Strong scaling, one step on more and more ranks, and weak scaling, where each rank keeps its share of work.
#include <fmt/format.h>

#include "trireme/bench/targets/families.h"

namespace trireme::bench {
namespace {

constexpr int64_t kLadder[] = {1, 2, 4, 8};

Target strong() {
  Comparison ladder{.difference = "the number of ranks, with the global batch held",
                    .expected = "twice the ranks take half the time, less what communication costs",
                    .arms = {}};
  for (const int64_t ranks : kLadder)
    ladder.arms.push_back({.name = fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"),
                           .owed = Owed::kSameLosses,
                           .ranks = ranks});
  return on_language_model({.name = "scaling",
                            .chapters = {kBasics, kBenchmarks},
                            .aliases = {"ddp_benchmark", "scaling_strong", "strong_scaling"},
                            .summary = "Strong scaling of DDP: the same batch on one rank and more",
                            .workload = {},
                            .declared = std::move(ladder)});
}

Target weak() {
  Comparison ladder{.difference = "the number of ranks, each with the same batch of its own",
                    .expected = "the time stays the same, and grows by what communication costs",
                    .arms = {}};
  for (const int64_t ranks : kLadder)
    ladder.arms.push_back({.name = fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s"),
                           .owed = Owed::kFiniteLosses,
                           .ranks = ranks});
  return on_language_model({.name = "scaling_weak",
                            .chapters = {kBasics, kBenchmarks},
                            .aliases = {"weak_scaling"},
                            .summary = "Weak scaling of DDP: one rank and more, with the same batch each",
                            .workload = {},
                            .on_cpu = {"train.rank_batch=4"},
                            .on_gpu = {"train.rank_batch=4"},
                            .declared = std::move(ladder),
                            .ranks = {2, 4, 8}});
}

}  // namespace

std::vector<Target> scaling_targets() {
  return {strong(), weak()};
}

}  // namespace trireme::bench
