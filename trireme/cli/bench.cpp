#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/build_info.h"
#include "trireme/base/text.h"
#include "trireme/cli/child.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/run_plan.h"
#include "trireme/cli/train_job.h"
#include "trireme/launch/local.h"
#include "trireme/plan/policy.h"
#include "trireme/report/cost_table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxMib = 16384;

struct MemoryOptions {
  std::string config;
  std::optional<int64_t> ranks;
  std::string policies = "ddp,zero1,zero2,zero3,fsdp:shard_grad_op";
  std::string run_dir;
  bool json = false;
};

Json to_json(const report::CostRow& row) {
  const auto state = [](const RunCost::State& bytes) {
    return Json{{"parameters", bytes.parameters},
                {"gradients", bytes.gradients},
                {"optimizer", bytes.optimizer},
                {"total", bytes.total()}};
  };
  return {{"policy", row.policy},
          {"state_bytes", {{"measured", state(row.cost.measured)}, {"predicted", state(row.cost.predicted)}}},
          {"wire_bytes_per_step",
           {{"measured", row.cost.measured_wire_bytes}, {"predicted", row.cost.predicted_wire_bytes}}},
          {"activation_bytes_predicted", row.cost.predicted_activation_bytes},
          {"step_ms", row.step_ms},
          {"peak_bytes", row.peak_bytes}};
}

/// The keys that make a run one of `policy`; they come last, so they win.
std::vector<std::string> overrides_of(const plan::Policy& policy) {
  return {fmt::format("parallel.policy={}", policy.name),
          fmt::format("parallel.sharding={}", policy.sharding), "checkpoint.final_weights=false",
          "train.sample_tokens=0"};
}

int bench_memory(const MemoryOptions& options, Front& front) {
  std::vector<plan::Policy> policies;  // all names are checked before anything runs
  for (const std::string& label : split(options.policies, ',')) policies.push_back(plan::find_policy(label));
  std::vector<report::CostRow> rows;
  for (const plan::Policy& policy : policies) {
    TrainJob job{.config = options.config,
                 .overrides = front.overrides,
                 .ranks = options.ranks,
                 .run_dir = options.run_dir,
                 .json = false,
                 .quiet = true,
                 .silent = true};
    for (const std::string& override_text : overrides_of(policy)) job.overrides.push_back(override_text);
    fmt::print(stderr, "bench memory: {}\n", policy.label());
    const FinishedJob finished = run_train_job(job, front);
    if (finished.code != 0) {
      fmt::print(stderr, "bench memory: {} ended with code {}; its logs are in {}\n", policy.label(),
                 finished.code, finished.run_directory);
      return finished.code;
    }
    rows.push_back(report::read_cost(
        finished.run_directory, policy.sharding == plan::Sharding::kFullShard ? "fsdp" : policy.label()));
  }
  if (options.json) {
    Json document = {
        {"schema", "trireme.bench_memory/1"}, {"command", front.command}, {"rows", Json::array()}};
    for (const report::CostRow& row : rows) document["rows"].push_back(to_json(row));
    fmt::print("{}\n", document.dump(2));
  } else {
    fmt::print("{}", report::cost_table(rows));
  }
  return 0;
}

struct CommOptions {
  std::optional<int64_t> ranks;
  std::string mib = "32,128,512";
  int64_t rounds = 5;
  bool json = false;
};

std::vector<int64_t> sizes_of(const std::string& text) {
  std::vector<int64_t> sizes;
  for (const std::string& word : split(text, ',')) {
    int64_t size = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), size);
    if (error != std::errc() || end != word.data() + word.size() || size < 1 || size > kMaxMib) {
      throw UsageError(fmt::format("[cli.bench] --mib: '{}' is no size from 1 to {}", word, kMaxMib),
                       "write MiB by comma: --mib 32,128");
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
    throw ConfigError("[cli.bench] collectives need two ranks, -n is {}; give -n 2 or more", ranks);
  }
  Request request{
      .verb = "bench_comm", .config = "", .run_dir = "", .command = front.command, .json = options.json};
  request.bench_comm = {
      .device = std::string(plan::name(device)), .mib = sizes_of(options.mib), .rounds = options.rounds};
  Environment environment = front.environment;
  prepare_torch(environment, device);
  return launch::run_local({.program = worker_path(),
                            .args = {request.verb},
                            .ranks = ranks,
                            .environment = worker_environment(environment, request),
                            .log_dir = ""});
}

void add_bench_comm(CLI::App& verb, Front& front) {
  auto options = std::make_shared<CommOptions>();
  CLI::App* comm = verb.add_subcommand("comm", "How long our collectives take, beside the backend's");
  comm->add_option("-n,--ranks", options->ranks, "Ranks to start (default: all GPUs, else 2)")
      ->option_text("RANKS");
  comm->add_option("--mib", options->mib, "Sizes of the whole tensor, by comma")->option_text("LIST");
  comm->add_option("--rounds", options->rounds, "Alternations of all cases; medians are shown")
      ->option_text("N")
      ->check(CLI::Range(1, 1000));
  comm->add_flag("--json", options->json, "One JSON document with all samples");
  comm->footer(
      "Example:\n"
      "  trireme bench comm --mib 32,512");
  comm->callback(
      [options, &front] { front.action = [options, &front] { return bench_comm(*options, front); }; });
}

}  // namespace

void add_bench(CLI::App& app, Front& front) {
  auto options = std::make_shared<MemoryOptions>();
  CLI::App* verb = app.add_subcommand("bench", "Measure strategies on this machine");
  verb->require_subcommand(1);
  CLI::App* memory = verb->add_subcommand(
      "memory",
      "What each data-parallel policy holds and sends, predicted and measured, each in its own ranks");
  add_config_file(*memory, options->config);
  memory->add_option("-n,--ranks", options->ranks, "Ranks to start (default: all GPUs, else 2)")
      ->option_text("RANKS");
  memory->add_option("--policies", options->policies, "Rows of 'trireme plan policy', by comma")
      ->option_text("LIST");
  memory->add_option("--run-dir", options->run_dir, "Parent of the run directories")->option_text("DIR");
  memory->add_flag("--json", options->json, "One JSON document");
  memory->footer(
      "Any config key can be given as --section.key=value.\n"
      "Example:\n"
      "  trireme bench memory configs/quickstart.yaml -n 4 --train.steps=20");
  add_bench_comm(*verb, front);
  memory->callback(
      [options, &front] { front.action = [options, &front] { return bench_memory(*options, front); }; });
}

}  // namespace trireme::cli
