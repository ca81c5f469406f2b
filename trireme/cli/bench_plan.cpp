#include "trireme/cli/bench_plan.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <utility>

#include "trireme/base/build_info.h"
#include "trireme/base/text.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/rates_file.h"
#include "trireme/cli/run_plan.h"
#include "trireme/plan/step_time.h"
#include "trireme/report/machine.h"

namespace trireme::cli {
namespace {

std::string key_of(const std::string& setting) {
  return setting.substr(0, setting.find('='));
}

/// Options and machine, which all targets of a bench have in common while it is planned.
struct Setting {
  const LabOptions& options;
  const Front& front;  ///< without overrides
  std::string device;
  int gpus = 0;
  std::optional<int64_t> ranks;  ///< that the user asked for
  bench::Depth depth = bench::Depth::kMinimal;
};

/// A target as the user wants it.
struct Wish {
  const bench::Target& target;
  TargetWords words;
  std::string config;
  std::optional<int64_t> ranks;  ///< asked for
  std::string mode;
};

/// The value of the last "device=" among `keys`, else that of the file `config`; empty: there is none.
plan::Device device_in(const std::vector<std::string>& keys, const std::string& config) {
  std::vector<std::string> only;
  for (const std::string& key : keys) {
    if (key_of(key) == "device") only.push_back(key);
  }
  return plan::load({.path = config, .text = "", .overrides = only}, Environment()).config.device;
}

/// The largest usual number of ranks for which there are GPUs; on CPUs the first. 0: there are too few GPUs.
int64_t usual_ranks(const bench::Target& target, const Setting& setting) {
  if (setting.device == "cpu") return target.ranks.front();
  int64_t most = 0;
  for (const int64_t ranks : target.ranks) {
    if (ranks <= setting.gpus) most = std::max(most, ranks);
  }
  return most;
}

/// Why it does not run here; empty: it does.
std::string why_skipped(const Wish& wish, const Setting& setting, const std::vector<std::string>& keys) {
  std::string why = bench::obstacle(wish.target, setting.device, wish.ranks, keys);
  if (!why.empty()) return why;
  const int64_t ranks = wish.ranks.value_or(usual_ranks(wish.target, setting));
  if (setting.device != "cpu" && (ranks == 0 || ranks > setting.gpus))
    return fmt::format("it takes {} GPUs, but there {} {}", ranks == 0 ? wish.target.ranks.front() : ranks,
                       setting.gpus == 1 ? "is" : "are", setting.gpus);
  const bool documents = wish.mode == "documents";
  if (documents && wish.target.documents.arms.empty()) return "no document says what its baseline is";
  return "";
}

/// The user's keys for a target; refuses those that the arms differ in.
std::vector<std::string> user_keys(const Wish& wish, const Setting& setting,
                                   const std::vector<bench::Arm>& arms) {
  std::vector<std::string> keys = setting.options.overrides;
  keys.insert(keys.end(), wish.words.keys.begin(), wish.words.keys.end());
  std::erase_if(keys, [](const std::string& key) { return key_of(key) == "device"; });  // run_keys() adds it
  for (const std::string& given : keys) {
    const std::string name = key_of(given);
    if (name == "train.steps" || name == "train.epochs")
      throw ConfigError("[cli.bench] the steps of a run are those of --warmup and --iterations; remove --{}",
                        given);
    for (const bench::Arm& arm : arms) {
      const auto varies = [&](const std::string& own) { return key_of(own) == name; };
      if (std::ranges::any_of(arm.keys, varies))
        throw ConfigError("[cli.bench] {} compares values of {}; remove --{}", bench::full_name(wish.target),
                          name, given);
    }
  }
  return keys;
}

/// The keys of a run in the order in which later ones win: the workload's, the user's, the arm's.
std::vector<std::string> run_keys(const bench::Target& target, const bench::Arm& arm, const Setting& setting,
                                  int64_t ranks, const std::vector<std::string>& user) {
  bench::Arm plain = arm;
  plain.keys.clear();
  std::vector<std::string> keys = bench::keys_of(target, plain, setting.device, ranks);
  keys.insert(keys.end(), user.begin(), user.end());
  keys.insert(keys.end(), arm.keys.begin(), arm.keys.end());
  keys.push_back("device=" + setting.device);
  return keys;
}

BenchRuns runs_with(const PlannedTarget& target, int64_t ranks, int64_t steps) {
  BenchRuns runs;
  runs.config = target.config;
  runs.ranks = ranks;
  runs.steps = steps;
  return runs;
}

/// A run on one rank that trains what `batch` and `keys` say, and shards, cuts and compresses nothing.
BenchRun twin_run(std::vector<std::string> keys, const plan::BatchPlan& batch, const std::string& device) {
  for (const char* key :
       {"parallel.policy=ddp", "parallel.sharding=auto", "parallel.reshard_after_forward=auto",
        "parallel.tp=1", "parallel.cp=1", "parallel.pp=1", "parallel.dp_replicate=1", "parallel.dp_shard=0",
        "parallel.comm_hook=none", "parallel.reduce_when=once", "precision.fp8=off",
        "pipeline.micro_batches=0", "pipeline.file=", "pipeline.spread_head=false", "train.rank_batch=0",
        "checkpoint.every=0"})
    keys.emplace_back(key);
  keys.push_back(fmt::format("train.global_batch={}", batch.global_batch));
  keys.push_back(fmt::format("train.micro_batch={}", device == "cpu" ? 0 : 1));
  return {.label = "one rank", .overrides = std::move(keys)};
}

/// The first steps tell as much as all, where the learning rate does not depend on their number.
int64_t twin_steps_of(const plan::Config& config, int64_t steps) {
  constexpr int64_t kFew = 6;
  return config.optim.schedule == plan::LrSchedule::kConstant ? std::min(kFew, steps) : steps;
}

/// Seconds of one run, from its floating-point operations: half of what small models reach.
double guessed_seconds(const RunPlan& plan, const plan::Config& config, int64_t steps) {
  const bool cpu = plan.device == plan::Device::kCpu;
  const double tokens = static_cast<double>(plan.batch.global_batch * config.data.seq_len * steps);
  const auto ranks = static_cast<double>(plan.ranks),
             cores = static_cast<double>(report::describe_machine().cores);
  const double flops_per_s = cpu ? 3e10 * std::min(ranks, cores) : 1.5e14 * ranks;
  return (cpu ? 1.0 : 8.0) + tokens * static_cast<double>(plan.facts.flops_per_token) / flops_per_s;
}

/// The key for --grad-accum: beside a micro-batch it says how large the batch of a rank is, else how small
/// the micro-batch.
std::string accumulation_key(const Wish& wish, const plan::BatchPlan& batch) {
  const int64_t count = *wish.words.accumulation, rank_batch = batch.global_batch / batch.dp_size;
  const auto sets_micro_batch = [](const std::string& key) { return key_of(key) == "train.micro_batch"; };
  if (std::ranges::any_of(wish.words.keys, sets_micro_batch))
    return fmt::format("train.rank_batch={}", batch.micro_batch * count);
  if (wish.target.pipelined || rank_batch % count != 0)
    throw ConfigError(
        "[cli.bench] --grad-accum {} does not divide the {} sequences of a rank of {}; use a divisor", count,
        rank_batch, bench::full_name(wish.target));
  return fmt::format("train.micro_batch={}", rank_batch / count);
}

/// Flags that need the batch to become keys.
void settle_batches(const Wish& wish, const plan::BatchPlan& batch, std::vector<bench::Arm>& arms,
                    std::vector<std::string>& user) {
  const TargetWords& words = wish.words;
  if (words.accumulation) user.push_back(accumulation_key(wish, batch));
  std::optional<int64_t> count = words.last_micro_batches;
  if (const auto& size = words.last_micro_batch_size) {
    if (*size < 1 || batch.global_batch % *size != 0)
      throw ConfigError("[cli.bench] micro-batches of {} do not divide the batch of {} of {}; use a divisor",
                        *size, batch.global_batch, bench::full_name(wish.target));
    count = batch.global_batch / *size;
  }
  if (!count) return;
  if (*count < 1 || batch.global_batch % *count != 0)
    throw ConfigError("[cli.bench] {} micro-batches do not divide the batch of {} of {}; use a divisor",
                      *count, batch.global_batch, bench::full_name(wish.target));
  bench::Arm& last = arms.back();
  const auto varies = [](const std::string& key) { return key.starts_with("pipeline.micro_batches="); };
  const auto key = std::ranges::find_if(last.keys, varies);
  if (key == last.keys.end())
    throw ConfigError(
        "[cli.bench] {} does not compare numbers of micro-batches; use --pipeline.micro_batches",
        bench::full_name(wish.target));
  *key = fmt::format("pipeline.micro_batches={}", *count);
  last.name = fmt::format("{} micro-batches", *count);
}

std::vector<bench::Arm> chosen_arms(const Wish& wish, const Setting& setting, int64_t ranks) {
  const bool documents = wish.mode == "documents";
  auto arms = bench::arms_on(documents ? wish.target.documents : wish.target.declared, setting.device, ranks);
  if (wish.words.only.empty()) return arms;
  std::erase_if(arms, [&](const bench::Arm& arm) { return !arm.name.starts_with(wish.words.only); });
  if (arms.empty())
    throw ConfigError("[cli.bench] {} has no arm '{}'; leave out --mode, or use --mode documents",
                      bench::full_name(wish.target), wish.words.only);
  // Nothing is compared, so that the user's keys win.
  std::vector<std::string> given = wish.words.keys;
  if (wish.words.accumulation) given.emplace_back("train.micro_batch");
  for (bench::Arm& arm : arms) {
    std::erase_if(arm.keys, [&](const std::string& own) {
      return std::ranges::any_of(given, [&](const std::string& key) { return key_of(key) == key_of(own); });
    });
  }
  return arms;
}

bench::TargetResult described(const Wish& wish, const Setting& setting) {
  const bench::Comparison& comparison =
      wish.mode == "documents" ? wish.target.documents : wish.target.declared;
  bench::TargetResult result;
  result.name = bench::full_name(wish.target);
  result.mode = wish.mode;
  result.summary = wish.target.summary;
  result.difference = comparison.difference;
  result.expected = comparison.expected;
  result.warm_up = setting.options.warm_up;
  result.steps = setting.options.warm_up + wish.words.steps.value_or(setting.options.iterations);
  result.blocks = setting.options.blocks;
  result.statistic = wish.target.statistic;
  result.shows_memory = wish.words.summary;
  return result;
}

/// The work of the kernels of an arm, or the reason why none is counted for its model.
PlannedWork count_work(const PreparedJob& job) {
  if (plan::reads_images(job.config.config.model.family))
    return {.why_not = "the plan has no shapes of convolutions"};
  PlannedWork work;
  try {
    const plan::StepWork step = plan::step_work(job.config.config, job.plan.ranks, job.plan.device);
    work.dtype = step.dtype;
    work.fp8 = step.fp8;
    for (size_t kind = 0; kind < plan::kKernelKinds; ++kind) {
      const plan::StepWork::Amount& amount = step.amounts[kind];
      if (amount.bytes <= 0.0) continue;
      work.counted.push_back({.group = std::string(plan::kNames<plan::KernelKind>[kind]),
                              .flops = amount.flops,
                              .bytes = amount.bytes});
    }
  } catch (const ConfigError& error) {
    work.why_not = error.what();
  }
  return work;
}

/// Plans the runs of all arms, which check_runs() has an eye on.
void plan_arms(PlannedTarget& planned, const Wish& wish, const Setting& setting,
               const std::vector<std::string>& user) {
  bench::TargetResult& result = planned.result;
  for (const bench::Arm& arm : result.arms) {
    const int64_t ranks = bench::ranks_of(arm, result.ranks);
    const BenchRun run{.label = fmt::format("{}, {}", result.name, arm.name),
                       .overrides = run_keys(wish.target, arm, setting, ranks, user)};
    const BenchRuns runs = runs_with(planned, ranks, result.steps);
    check_runs({run}, runs, setting.front);
    const PreparedJob job = prepare(run, runs, setting.front);
    planned.estimated_s +=
        2.0 * static_cast<double>(result.blocks) * guessed_seconds(job.plan, job.config.config, result.steps);
    if (setting.depth >= bench::Depth::kDeep)
      planned.profile_s += guessed_seconds(job.plan, job.config.config, kStepsBeforeTrace + kTracedSteps);
    if (setting.depth == bench::Depth::kRoofline) planned.work.push_back(count_work(job));
    planned.arms.push_back(run);
    planned.arm_ranks.push_back(ranks);
    result.keys.push_back(run.overrides);
  }
}

/// As many threads a rank as the largest arm leaves cores; 0: the user has said how many, or GPUs compute.
int64_t threads_for(const std::vector<int64_t>& arm_ranks, const Setting& setting) {
  if (setting.device != "cpu" || setting.front.environment.get("OMP_NUM_THREADS")) return 0;
  return std::max<int64_t>(1, report::describe_machine().cores / std::ranges::max(arm_ranks));
}

PlannedTarget plan_one(const Wish& wish, const Setting& setting) {
  PlannedTarget planned{.result = described(wish, setting),
                        .config = wish.config,
                        .arms = {},
                        .arm_ranks = {},
                        .twin = {},
                        .why_no_twin = {},
                        .twin_steps = 0,
                        .limit_s = wish.target.limit_s,
                        .estimated_s = 0.0};
  bench::TargetResult& result = planned.result;
  std::vector<std::string> asked = setting.options.overrides;
  asked.insert(asked.end(), wish.words.keys.begin(), wish.words.keys.end());
  result.reason = why_skipped(wish, setting, asked);
  if (!result.reason.empty()) {
    result.state = bench::State::kSkipped;
    return planned;
  }
  result.ranks = wish.ranks.value_or(usual_ranks(wish.target, setting));
  result.arms = chosen_arms(wish, setting, result.ranks);
  std::vector<std::string> user = user_keys(wish, setting, result.arms);
  const bench::Arm& reference = result.arms.front();
  const int64_t ranks = bench::ranks_of(reference, result.ranks);
  const auto keys = [&] { return run_keys(wish.target, reference, setting, ranks, user); };
  const BenchRuns runs = runs_with(planned, ranks, result.steps);
  const PreparedJob job = prepare({.label = "", .overrides = keys()}, runs, setting.front);
  settle_batches(wish, job.plan.batch, result.arms, user);
  user_keys({wish.target, {.keys = user}, "", {}, ""}, setting, result.arms);
  plan_arms(planned, wish, setting, user);
  result.threads = threads_for(planned.arm_ranks, setting);
  const plan::BatchPlan batch = prepare({.label = "", .overrides = keys()}, runs, setting.front).plan.batch;
  planned.twin = twin_run(keys(), batch, setting.device);
  planned.twin_steps = twin_steps_of(job.config.config, result.steps);
  const BenchRuns alone = runs_with(planned, 1, planned.twin_steps);
  const PreparedJob twin = prepare(*planned.twin, alone, setting.front);
  planned.estimated_s += guessed_seconds(twin.plan, twin.config.config, planned.twin_steps);
  if (twin.plan.cannot_fit()) {
    planned.twin.reset();
    planned.why_no_twin = "one rank does not have the memory for it";
  }
  return planned;
}

/// Whether a key may change what a step computes, in more than its rounding.
bench::Owed owed_for(const std::string& key) {
  return key.starts_with("precision.") || key == "parallel.comm_hook" ? bench::Owed::kNearLosses
                                                                      : bench::Owed::kSameLosses;
}

/// Whether a key says how a workload is trained, and not what it is.
bool says_how(const std::string& key) {
  return key.starts_with("parallel.") || key.starts_with("pipeline.") || key.starts_with("precision.") ||
         key.starts_with("memory.") || key.starts_with("comm.") || key.starts_with("checkpoint.") ||
         key == "train.micro_batch" || key == "train.cuda_graphs" || key == "train.deterministic" ||
         key == "data.threads";
}

/// A config of the user's own as a target: `arms` is "section.key=a,b".
bench::Target own_target(const std::string& config, const std::string& arms, int64_t ranks) {
  const size_t equals = arms.find('=');
  const std::string key = arms.substr(0, equals);
  const std::string values = equals == std::string::npos ? "" : arms.substr(equals + 1);
  const std::vector<std::string> all = split(values, values.find(';') == std::string::npos ? ',' : ';');
  if (key.empty() || all.size() < 2 || std::ranges::find(all, "") != all.end())
    throw ConfigError(
        "[cli.bench] --arms {} is no key with two values or more; write --arms parallel.policy=ddp,fsdp",
        arms);
  if (!says_how(key))
    throw ConfigError(
        "[cli.bench] --arms {}: {} says what is trained, so that times of its values say nothing "
        "about each other; 'trireme sweep --grid {}' compares their losses",
        arms, key, arms);
  bench::Comparison comparison{.difference = key, .expected = "not said", .arms = {}};
  for (const std::string& value : all)
    comparison.arms.push_back(
        {.name = value, .keys = {key + "=" + value}, .owed = owed_for(key), .bound = 0.05});
  return {.name = std::filesystem::path(config).stem().string(),
          .chapters = {},
          .summary = fmt::format("{} by {}", config, key),
          .workload = {},
          .declared = std::move(comparison),
          .ranks = {ranks},
          .limit_s = 3600.0};
}

/// The words of --targets, or the chapter.
std::vector<bench::Choice> choices_of(const LabOptions& options) {
  std::vector<bench::Choice> choices;
  const auto add = [&](const std::vector<bench::Choice>& more) {
    for (const bench::Choice& one : more) {
      const auto same = [&](const bench::Choice& other) {
        return other.target == one.target && other.ranks == one.ranks;
      };
      if (std::ranges::none_of(choices, same)) choices.push_back(one);
    }
  };
  if (!options.chapter.empty()) add(bench::targets_of_chapter(options.chapter));
  for (const std::string& word : options.targets) {
    for (const std::string& one : split(word, ',')) {
      if (one == "all") {
        for (const bench::Target& target : bench::all_targets()) add({{.target = &target}});
      } else {
        add(bench::find_targets(one));
      }
    }
  }
  return choices;
}

void check_options(const LabOptions& options) {
  bench::depth_of(options.profile);  // throws
  const bool named = !options.targets.empty() || !options.chapter.empty();
  if (named == !options.config.empty())
    throw ConfigError("[cli.bench] {}; name --targets T or --chapter C, or --config FILE with --arms",
                      named ? "there are targets and a config" : "there is nothing to measure");
  if (options.config.empty() != options.arms.empty())
    throw ConfigError(
        "[cli.bench] --config and --arms belong together; write --config FILE --arms "
        "parallel.policy=ddp,fsdp");
  if (!options.config.empty() && !options.extra.empty())
    throw ConfigError(
        "[cli.bench] --target-extra-arg is for targets, but a config is measured; give its keys as "
        "--section.key=value");
  if (!options.probe.empty() && bench::depth_of(options.profile) != bench::Depth::kRoofline)
    throw ConfigError(
        "[cli.bench] --probe {} is for --profile roofline, not {}; use that profile, or leave it out",
        options.probe, options.profile);
}

std::vector<PlannedTarget> plan_targets(const Setting& setting) {
  const LabOptions& options = setting.options;
  std::vector<PlannedTarget> planned;
  if (!options.config.empty()) {
    const int64_t ranks = choose_ranks(
        setting.ranks, setting.device == "cpu" ? plan::Device::kCpu : plan::Device::kCuda, setting.gpus);
    const bench::Target own = own_target(options.config, options.arms, ranks);
    planned.push_back(plan_one({own, {}, options.config, ranks, "declared"}, setting));
    return planned;
  }
  const std::vector<bench::Choice> choices = choices_of(options);
  const auto words = extra_words(options.extra, choices);
  for (const bench::Choice& choice : choices) {
    const auto found = words.find(choice.target);
    Wish wish{*choice.target, found == words.end() ? TargetWords() : found->second, "", setting.ranks,
              options.mode};
    if (choice.ranks) wish.ranks = choice.ranks;
    if (wish.words.ranks) wish.ranks = wish.words.ranks;
    if (!wish.words.mode.empty()) wish.mode = wish.words.mode;
    planned.push_back(plan_one(wish, setting));
  }
  return planned;
}

}  // namespace

nlohmann::json to_json(const LabOptions& options) {
  return {{"targets", options.targets},
          {"chapter", options.chapter},
          {"config", options.config},
          {"arms", options.arms},
          {"mode", options.mode},
          {"profile", options.profile},
          {"probe", options.probe},
          {"iterations", options.iterations},
          {"warm_up", options.warm_up},
          {"blocks", options.blocks},
          {"ranks", options.ranks.value_or(0)},
          {"extra", options.extra},
          {"variables", options.variables},
          {"overrides", options.overrides}};
}

LabOptions lab_options_from(const nlohmann::json& json) {
  LabOptions options{.targets = json.at("targets"),
                     .chapter = json.at("chapter"),
                     .config = json.at("config"),
                     .arms = json.at("arms"),
                     .mode = json.at("mode"),
                     .profile = json.at("profile"),
                     .probe = json.value("probe", ""),
                     .iterations = json.at("iterations"),
                     .warm_up = json.at("warm_up"),
                     .blocks = json.at("blocks"),
                     .ranks = {},
                     .extra = json.at("extra"),
                     .variables = json.at("variables"),
                     .overrides = json.at("overrides")};
  if (const int64_t ranks = json.at("ranks"); ranks > 0) options.ranks = ranks;
  return options;
}

ProbedRanks LabPlan::probed(const PlannedTarget& target, size_t arm) const {
  if (device == "cpu") return {.ranks = target.arm_ranks[arm], .threads = target.result.threads};
  int64_t most = 1;
  for (const PlannedTarget& one : targets) {
    for (const int64_t ranks : one.arm_ranks) most = std::max(most, ranks);
  }
  return {.ranks = most};
}

double LabPlan::profile_s() const {
  constexpr double kRates_s = 60.0;  // of which a GPU takes half
  std::set<ProbedRanks> measured;
  for (const PlannedTarget& target : targets) {
    for (size_t arm = 0; arm < target.work.size(); ++arm) measured.insert(probed(target, arm));
  }
  const double rates_s = probe.empty() ? kRates_s * static_cast<double>(measured.size()) : 0.0;
  return std::accumulate(targets.begin(), targets.end(), rates_s,
                         [](double sum, const PlannedTarget& target) { return sum + target.profile_s; });
}

double LabPlan::estimated_s() const {
  return std::accumulate(targets.begin(), targets.end(), profile_s(),
                         [](double sum, const PlannedTarget& target) { return sum + target.estimated_s; });
}

LabPlan plan_lab(const LabOptions& options, const Front& given) {
  check_options(options);
  const LaunchWords launch = launch_words(options.variables, given.environment);
  Front front = given;
  front.overrides.clear();
  for (const std::string& variable : launch.environment)
    front.environment.set(key_of(variable), variable.substr(variable.find('=') + 1));
  const plan::Device asked = device_in(options.overrides, options.config);
  const int gpus = kHasCuda && asked != plan::Device::kCpu ? gpu_count() : 0;
  const std::string device(plan::name(choose_device(asked, gpus)));
  const Setting setting{options,
                        front,
                        device,
                        gpus,
                        options.ranks ? options.ranks : launch.ranks,
                        bench::depth_of(options.profile)};
  if (!options.probe.empty()) read_rates(options.probe, *plan::parse<plan::Device>(device));
  return {.device = device,
          .environment = launch.environment,
          .targets = plan_targets(setting),
          .depth = setting.depth,
          .probe = options.probe};
}

Front front_for(const PlannedTarget& target, const LabPlan& plan, const Front& given) {
  Front front = given;
  front.overrides.clear();
  if (target.result.threads > 0)
    front.environment.set("OMP_NUM_THREADS", std::to_string(target.result.threads));
  for (const std::string& variable : plan.environment)
    front.environment.set(key_of(variable), variable.substr(variable.find('=') + 1));
  return front;
}

}  // namespace trireme::cli
