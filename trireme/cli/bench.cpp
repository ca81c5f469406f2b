#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <memory>
#include <optional>

#include "trireme/base/build_info.h"
#include "trireme/base/text.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/run_plan.h"
#include "trireme/cli/train_job.h"

namespace trireme::cli {
namespace {

constexpr int64_t kMaxMib = 16384;

struct CommOptions {
  std::optional<int64_t> ranks;
  std::string mib = "32,128,512";
  int64_t rounds = 5;
  bool json = false;
  bool pairs = false;
};

std::vector<int64_t> sizes_of(const std::string& text) {
  std::vector<int64_t> sizes;
  for (const std::string& word : split(text, ',')) {
    int64_t size = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), size);
    if (error != std::errc() || end != word.data() + word.size() || size < 1 || size > kMaxMib) {
      throw UsageError(fmt::format("[cli.bench] --mib: '{}' is not a size from 1 to {}", word, kMaxMib),
                       "write sizes in MiB, separated by commas: --mib 32,128");
    }
    sizes.push_back(size);
  }
  return sizes;
}

int bench_comm(const CommOptions& options, Front& front) {
  const int gpus = kHasCuda ? gpu_count() : 0;
  const plan::Device device = choose_device(plan::Device::kAuto, gpus);
  const int64_t ranks = choose_ranks(options.ranks, device, gpus);
  if (ranks < 2) {
    throw ConfigError("[cli.bench] collectives need at least two ranks, but -n is {}; use -n 2 or more",
                      ranks);
  }
  Request request{
      .verb = "bench_comm", .config = "", .run_dir = "", .command = front.command, .json = options.json};
  request.bench_comm = {.device = std::string(plan::name(device)),
                        .mib = sizes_of(options.mib),
                        .rounds = options.rounds,
                        .pairs = options.pairs};
  return run_workers(request, front.environment, device, ranks);
}

void add_bench_comm(CLI::App& verb, Front& front) {
  auto options = std::make_shared<CommOptions>();
  CLI::App* comm = verb.add_subcommand("comm", "Time Trireme's collectives beside the backend's own");
  comm->add_option("-n,--ranks", options->ranks, "Ranks to start (default: all GPUs, else 2)")
      ->option_text("RANKS");
  comm->add_option("--mib", options->mib,
                   with_default("Sizes of the whole tensor in MiB, separated by commas", options->mib))
      ->option_text("LIST");
  comm->add_option("--rounds", options->rounds,
                   with_default("Rounds over all cases; medians are shown", options->rounds))
      ->option_text("N")
      ->check(CLI::Range(1, 1000));
  comm->add_flag("--pairs", options->pairs, "Also time messages of the largest size between each two ranks");
  comm->add_flag("--json", options->json, "Print one JSON document with all samples");
  comm->footer(
      "ms: the median over the rounds, of the rank that is done last. algbw and busbw: those of nccl-tests\n"
      "in GB/s, the size of the tensor, and the bytes that one rank receives, over that time. Every case is\n"
      "checked once: wrong counts elements that are not what they should be, and then the exit code is 8.\n"
      "Examples:\n"
      "  trireme bench comm --mib 32,512\n"
      "  trireme bench comm -n 4 --mib 8 --pairs");
  comm->callback(
      [options, &front] { front.action = [options, &front] { return bench_comm(*options, front); }; });
}

}  // namespace

void add_bench(CLI::App& app, Front& front) {
  CLI::App* verb = app.add_subcommand("bench", "Measure strategies on this machine");
  verb->require_subcommand(1);
  add_bench_targets(*verb, front);
  add_bench_run(*verb, front);
  add_bench_results(*verb, front);
  add_bench_speed(*verb, front);
  add_bench_memory(*verb, front);
  add_bench_comm(*verb, front);
  add_bench_pipeline(*verb, front);
  add_bench_images(*verb, front);
}

}  // namespace trireme::cli
