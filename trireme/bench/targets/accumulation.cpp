// Steps of several micro-batches: their size, and when their gradients travel.
#include <fmt/format.h>

#include "trireme/bench/targets/families.h"

namespace trireme::bench {
namespace {

Target sizes() {
  const auto arm = [](int64_t size) {
    return Arm{.name = fmt::format("micro-batch {}", size),
               .keys = {fmt::format("train.micro_batch={}", size)},
               .owed = Owed::kSameLosses};
  };
  return on_language_model({.name = "accumulation",
                            .chapters = {kAdvanced},
                            .aliases = {"gradient_accumulation"},
                            .summary = "One large micro-batch a step, against more and smaller ones",
                            .workload = {},
                            .declared = {.difference = "train.micro_batch, with the global batch held",
                                         .expected = "smaller micro-batches need less memory and more time",
                                         .arms = {arm(4), arm(2), arm(1)}},
                            .ranks = {2}});
}

Target no_sync() {
  const auto arm = [](const std::string& when) {
    return Arm{.name = when, .keys = {"parallel.reduce_when=" + when}, .owed = Owed::kSameLosses};
  };
  return on_language_model({.name = "no_sync",
                            .chapters = {kAdvanced},
                            .aliases = {"accumulation_no_sync"},
                            .summary = "Gradients that travel after every micro-batch, against once a step",
                            .workload = {"train.micro_batch=1"},
                            .declared = {.difference = "parallel.reduce_when",
                                         .expected = "once sends fewer bytes and takes less time",
                                         .arms = {arm("every_micro_batch"), arm("once")}}});
}

}  // namespace

std::vector<Target> accumulation_targets() {
  return {sizes(), no_sync()};
}

}  // namespace trireme::bench
