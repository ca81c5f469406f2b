#include "trireme/cli/bench_session.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "trireme/base/build_info.h"
#include "trireme/base/clock.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/cli/child.h"
#include "trireme/cli/rates_file.h"
#include "trireme/report/machine.h"
#include "trireme/report/run_record.h"

namespace trireme::cli {
namespace {

/// The commit of the repository that this program was built in; empty where it lies in none.
std::string commit_of(const Environment& environment) {
  const std::filesystem::path here = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  constexpr double kSeconds = 5.0;
  try {
    const ChildOutput git =
        run_child("/usr/bin/git", {"-C", here.string(), "describe", "--always", "--dirty", "--abbrev=12"},
                  environment, kSeconds);
    return git.exit_code == 0 ? split(git.out, '\n').front() : "";
  } catch (const EnvironmentError&) {
    return "";  // a machine without git
  }
}

std::string digest_of_file(const std::string& path) {
  const MappedFile file(path);
  return hex64(xxh3(file.bytes().data(), file.bytes().size()));
}

double load_of_last_minute() {
  std::ifstream file("/proc/loadavg");
  double load = 0.0;
  file >> load;
  return load;
}

/// "2 x NVIDIA H100 80GB HBM3", as the driver lists them; `device` itself where it lists none.
std::string device_text(const std::string& device) {
  std::map<std::string, int64_t> models;
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none)) {
    std::ifstream file(gpu.path() / "information");
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with("Model:"))
        ++models[line.substr(std::min(line.size(), line.find_first_not_of(" \t", 6)))];
    }
  }
  if (device != "cuda" || models.empty()) return device;
  std::vector<std::string> words;
  for (const auto& [model, count] : models) words.push_back(fmt::format("{} x {}", count, model));
  return join(words, " + ");
}

bench::Machine this_machine(const std::string& device) {
  const report::Machine machine = report::describe_machine();
  return {.hostname = machine.hostname,
          .cpu = machine.cpu,
          .kernel = machine.kernel,
          .device = device_text(device),
          .cores = machine.cores,
          .memory_bytes = machine.memory_bytes,
          .load = load_of_last_minute()};
}

/// Whether a signal, and not its own failure, ended a run.
bool was_asked_to_stop(int code) {
  return is_stop_code(code) || code == static_cast<int>(ExitCode::kPreempted);
}

bool went_well(const bench::Sample& sample) {
  return sample.code == 0 && sample.error.empty();
}

BenchRuns runs_of(const PlannedTarget& planned, int64_t ranks, int64_t steps) {
  BenchRuns runs;
  runs.config = planned.config;
  runs.ranks = ranks;
  runs.steps = steps;
  runs.limit_s = planned.limit_s;
  return runs;
}

std::string why_failed(const bench::Sample& sample, double limit_s) {
  constexpr int kAlarm = 128 + 14;
  if (sample.code == kAlarm) return fmt::format("a run took more than {:g} s", limit_s);
  return fmt::format(
      "a run ended with code {}{}", sample.code,
      sample.directory.empty() ? "" : fmt::format("; its logs are in {}/logs", sample.directory));
}

/// The roof of a rank by `rates`, for products in the dtypes of an arm.
bench::Roof roof_of(const plan::Rates& rates, const PlannedWork& work) {
  const plan::MemoryRates& memory = rates.memory_of(work.dtype);
  const double products = rates.fastest_product(work.dtype);
  return {.origin = rates.origin,
          .ranks = rates.ranks,
          .flops_per_s = work.fp8 ? std::max(products, rates.fastest_product("fp8")) : products,
          .bytes_per_s = memory.most(),
          .cached_bytes_per_s = memory.cached};
}

/// The profile that a traced run has left.
bench::ArmProfile read_profile(const BenchResult& done, size_t arm, double limit_s) {
  bench::ArmProfile profile{.arm = static_cast<int64_t>(arm), .directory = done.run_directory};
  const bench::Sample sample = bench::read_sample(done.run_directory, {}, done.code);
  if (done.code != 0 || !sample.error.empty()) {
    profile.error = done.code != 0 ? why_failed(sample, limit_s) : sample.error;
    return profile;
  }
  const report::RunRecord run = report::read_run(done.run_directory);
  const std::string trace = done.run_directory + "/traces/rank-0.json";
  if (!run.summary || !run.summary->profile) {
    profile.error = fmt::format("{}/summary.json has no profile", done.run_directory);
  } else if (!std::filesystem::exists(trace)) {
    profile.error = fmt::format("there is no {}", trace);
  } else {
    profile.kernels = *run.summary->profile;
    profile.trace = trace;
    if (profile.kernels.groups.empty())
      profile.error = fmt::format("{} has no {}", trace,
                                  profile.kernels.of_gpu
                                      ? "GPU kernels; does another profiler use CUPTI, or may only root?"
                                      : "operators");
  }
  return profile;
}

}  // namespace

bench::Results new_results(const LabOptions& options, const LabPlan& plan, const Front& front) {
  bench::Results results{.command = front.command,
                         .started = utc_timestamp(),
                         .version = kVersion,
                         .commit = commit_of(front.environment),
                         .worker_digest = digest_of_file(worker_path()),
                         .machine = this_machine(plan.device),
                         .profile = options.profile,
                         .environment = plan.environment,
                         .request = to_json(options),
                         .complete = false,
                         .targets = {}};
  for (const PlannedTarget& target : plan.targets) results.targets.push_back(target.result);
  return results;
}

void take_over(bench::Results& results, const bench::Results& earlier) {
  if (earlier.machine.hardware() != results.machine.hardware())
    throw ConfigError(
        "[cli.bench] --continue: it was begun on other hardware ({}, not {}); measure all again",
        earlier.machine.hardware(), results.machine.hardware());
  if (earlier.worker_digest != results.worker_digest)
    throw ConfigError(
        "[cli.bench] --continue: it was begun with another build of trireme-worker ({}, not {}); "
        "measure all again",
        earlier.worker_digest, results.worker_digest);
  if (earlier.targets.size() != results.targets.size())
    throw ConfigError("[cli.bench] --continue: it has {} targets, but {} are planned; measure all again",
                      earlier.targets.size(), results.targets.size());
  if (earlier.environment != results.environment)
    throw ConfigError("[cli.bench] --continue: ranks had other variables ({}, not {}); measure all again",
                      join(earlier.environment, " "), join(results.environment, " "));
  results.started = earlier.started;
  results.command = earlier.command;
  for (size_t i = 0; i < results.targets.size(); ++i) {
    bench::TargetResult& target = results.targets[i];
    const bench::TargetResult& before = earlier.targets[i];
    const bool same = target.name == before.name && target.keys == before.keys &&
                      target.ranks == before.ranks && target.threads == before.threads &&
                      target.blocks == before.blocks && target.steps == before.steps &&
                      target.warm_up == before.warm_up;
    if (!same)
      throw ConfigError(
          "[cli.bench] --continue: {} was {} or had other ranks, threads, steps or keys; measure all again",
          target.name, before.name);
    if (std::ranges::all_of(before.twins, went_well)) target.twins = before.twins;
    if (std::ranges::all_of(before.proofs, went_well)) target.proofs = before.proofs;
    for (const bench::ArmProfile& profile : before.profiles) {
      const bool complete = profile.error.empty() && profile.why_no_roof.empty();
      if (complete) target.profiles.push_back(profile);
    }
    for (const bench::Sample& sample : before.samples) {
      if (!went_well(sample)) break;
      target.samples.push_back(sample);
    }
  }
}

BenchSession::BenchSession(const LabPlan& plan, Front& front, std::string folder, bench::Results results)
    : plan_(plan), front_(front), folder_(std::move(folder)), results_(std::move(results)) {
  make_directories(folder_);
  write();
}

void BenchSession::write() const {
  write_file_atomic(folder_ + "/results.json", bench::to_json_text(results_));
}

int BenchSession::run() {
  const double begin = monotonic_seconds();
  double left = 0.0;
  for (const PlannedTarget& target : plan_.targets) left += target.all_s();
  const double estimated = left;
  for (size_t i = 0; i < results_.targets.size(); ++i) {
    const int code = run_target(i);
    write();
    if (code != 0) return code;
    left -= plan_.targets[i].all_s();
    const double done = estimated - left;
    if (left > 0.5 && done > 0.0)
      log_info("bench: about {} left", format_duration(left / done * (monotonic_seconds() - begin)));
  }
  results_.complete = true;
  write();
  return 0;
}

int BenchSession::run_target(size_t index) {
  const PlannedTarget& planned = plan_.targets[index];
  bench::TargetResult& target = results_.targets[index];
  if (target.state == bench::State::kSkipped) return 0;
  Front front = front_for(planned, plan_, front_);
  const auto order = bench::run_order(static_cast<int64_t>(target.arms.size()), target.blocks);
  for (size_t i = target.samples.size(); i < order.size(); ++i) {
    const int code = run_slot(planned, target, order[i], front);
    if (code != 0 || target.state == bench::State::kFailed) return code;
  }
  if (const int code = run_twin(planned, target, front); code != 0) return code;
  if (const int code = run_proofs(planned, target, front); code != 0) return code;
  if (const int code = run_profiles(planned, target, front); code != 0) return code;
  judge(target, planned.why_no_twin);
  return 0;
}

int BenchSession::run_slot(const PlannedTarget& planned, bench::TargetResult& target, const bench::Slot& slot,
                           Front& front) {
  const auto arm = static_cast<size_t>(slot.arm);
  BenchRun run = planned.arms[arm];
  run.label +=
      fmt::format(", block {} of {}{}", slot.block + 1, target.blocks, slot.half == 0 ? "" : ", back");
  const BenchResult done = train_once(run, runs_of(planned, planned.arm_ranks[arm], target.steps), front);
  if (was_asked_to_stop(done.code)) return done.code;
  target.samples.push_back(bench::read_sample(done.run_directory, slot, done.code));
  if (done.code != 0) {
    target.state = bench::State::kFailed;
    target.reason = why_failed(target.samples.back(), planned.limit_s);
  }
  write();
  return 0;
}

int BenchSession::run_twin(const PlannedTarget& planned, bench::TargetResult& target, Front& front) {
  if (!planned.twin || !target.twins.empty()) return 0;
  const std::string key =
      fmt::format("{} {} {}", planned.config, planned.twin_steps, join(planned.twin->overrides, " "));
  const auto known = std::ranges::find(twins_, key, &std::pair<std::string, bench::Sample>::first);
  if (known != twins_.end()) {
    target.twins = {known->second};
    return 0;
  }
  BenchRun run = *planned.twin;
  run.label = fmt::format("{}, verified on one rank", target.name);
  const BenchResult done = train_once(run, runs_of(planned, 1, planned.twin_steps), front);
  if (was_asked_to_stop(done.code)) return done.code;
  target.twins = {bench::read_sample(done.run_directory, {}, done.code)};
  twins_.emplace_back(key, target.twins.front());
  return 0;
}

/// After all that is timed: tracing takes time, and its steps are no samples.
int BenchSession::run_profiles(const PlannedTarget& planned, bench::TargetResult& target, Front& front) {
  if (plan_.depth < bench::Depth::kDeep) return 0;
  for (size_t arm = 0; arm < target.arms.size(); ++arm) {
    const auto is_there =
        std::ranges::find(target.profiles, static_cast<int64_t>(arm), &bench::ArmProfile::arm);
    if (is_there != target.profiles.end()) continue;
    BenchRun run = planned.arms[arm];
    run.label += ", traced";
    run.overrides.push_back(fmt::format("train.profile_steps={}", kTracedSteps));
    const BenchResult done =
        train_once(run, runs_of(planned, planned.arm_ranks[arm], kStepsBeforeTrace + kTracedSteps), front);
    if (was_asked_to_stop(done.code)) return done.code;
    bench::ArmProfile profile = read_profile(done, arm, planned.limit_s);
    if (profile.error.empty() && plan_.depth == bench::Depth::kRoofline) {
      if (const int code = add_roof(planned, profile, front); code != 0) return code;
    }
    target.profiles.push_back(std::move(profile));
    write();
  }
  std::ranges::sort(target.profiles, {}, &bench::ArmProfile::arm);
  return 0;
}

/// Adds the counted work of an arm, and the roof that it is held against. Returns the code of a signal that
/// ended the measuring of rates, else 0.
int BenchSession::add_roof(const PlannedTarget& planned, bench::ArmProfile& profile, const Front& front) {
  const auto arm = static_cast<size_t>(profile.arm);
  const PlannedWork& work = planned.work[arm];
  profile.counted = work.counted;
  profile.why_not_counted = work.why_not;
  if (work.counted.empty()) return 0;
  const auto device = *plan::parse<plan::Device>(plan_.device);
  const ProbedRanks probed = plan_.probed(planned, arm);
  std::string file = plan_.probe;
  if (file.empty()) {
    file = fmt::format("{}/rates-{}x{}.json", folder_, probed.ranks, probed.threads);
    if (!std::filesystem::exists(file) && !why_no_rates_.contains(probed)) {
      const int code = measure_rates(file, device, probed.ranks, front.environment, front.command);
      if (was_asked_to_stop(code)) return code;
      if (code != 0)
        why_no_rates_[probed] =
            fmt::format("measuring the rates of {} ranks ended with code {}", probed.ranks, code);
    }
  }
  const auto failed = why_no_rates_.find(probed);
  if (failed != why_no_rates_.end()) {
    profile.why_no_roof = failed->second;
    return 0;
  }
  try {
    const plan::Rates rates = read_rates(file, device);
    if (device == plan::Device::kCpu && rates.ranks != probed.ranks) {
      profile.why_no_roof = fmt::format(
          "{} has the rates of {} ranks at once, which share cores otherwise than {} do; measure with "
          "'trireme doctor --probe FILE --cpu -n {}'",
          file, rates.ranks, probed.ranks, probed.ranks);
    } else {
      profile.roof = roof_of(rates, work);
    }
  } catch (const Error& error) {
    profile.why_no_roof = error.what();
  }
  return 0;
}

int BenchSession::run_proofs(const PlannedTarget& planned, bench::TargetResult& target, Front& front) {
  if (!bench::needs_proofs(target)) return 0;
  const int64_t steps = planned.twin_steps > 0 ? planned.twin_steps : target.steps;
  for (size_t arm = target.proofs.size(); arm < target.arms.size(); ++arm) {
    BenchRun run = planned.arms[arm];
    run.label += ", verified with train.deterministic=true";
    run.overrides.emplace_back("train.deterministic=true");
    const BenchResult done = train_once(run, runs_of(planned, planned.arm_ranks[arm], steps), front);
    if (was_asked_to_stop(done.code)) return done.code;
    target.proofs.push_back(
        bench::read_sample(done.run_directory, {.arm = static_cast<int64_t>(arm)}, done.code));
    write();
  }
  return 0;
}

}  // namespace trireme::cli
