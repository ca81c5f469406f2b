#include "trireme/bench/results.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::bench {
namespace {

using Json = nlohmann::json;

constexpr const char* kResultsSchema = "trireme.bench/1";

Json arm_json(const Arm& arm) {
  return {{"name", arm.name},       {"keys", arm.keys},   {"owed", static_cast<int>(arm.owed)},
          {"owes", owed_text(arm)}, {"bound", arm.bound}, {"ranks", arm.ranks}};
}

Arm arm_from(const Json& json) {
  return {.name = json.at("name"),
          .keys = json.at("keys"),
          .owed = static_cast<Owed>(json.at("owed").get<int>()),
          .bound = json.at("bound"),
          .ranks = json.at("ranks")};
}

Json check_json(const Check& check) {
  return {{"what", check.what}, {"holds", check.holds}, {"detail", check.detail}};
}

/// Numbers that follow from the samples, for readers of the file; results_from_json() makes it again.
Json scores_json(const TargetResult& target) {
  Json all = Json::array();
  const std::vector<Score> scores = score(target);
  for (size_t i = 0; i < scores.size(); ++i) {
    const Score& one = scores[i];
    all.push_back({{"arm", target.arms[i].name},
                   {"median_ms", one.median_ms},
                   {"run_ms", one.values},
                   {"ratios", one.ratios},
                   {"ratio", one.ratios.empty() ? Json() : Json(one.ratio)},
                   {"low", one.ratios.empty() ? Json() : Json(one.interval.low)},
                   {"high", one.ratios.empty() ? Json() : Json(one.interval.high)},
                   {"verdict", verdict_text(one)}});
  }
  return all;
}

Json target_json(const TargetResult& target) {
  Json arms = Json::array(), checks = Json::array();
  for (const Arm& arm : target.arms) arms.push_back(arm_json(arm));
  for (const Check& check : target.checks) checks.push_back(check_json(check));
  return {
      {"name", target.name},
      {"mode", target.mode},
      {"summary", target.summary},
      {"difference", target.difference},
      {"expected", target.expected},
      {"state", state_text(target.state)},
      {"reason", target.reason},
      {"ranks", target.ranks},
      {"threads", target.threads},
      {"steps", target.steps},
      {"warm_up", target.warm_up},
      {"blocks", target.blocks},
      {"statistic", target.statistic == Statistic::kMedian ? "median" : "mean"},
      {"shows_memory", target.shows_memory},
      {"workload_hash", target.samples.empty() ? Json() : Json(workload_hash(target.samples[0].workload))},
      {"arms", arms},
      {"keys", target.keys},
      {"scores", scores_json(target)},
      {"checks", checks},
      {"samples", target.samples},
      {"twins", target.twins},
      {"proofs", target.proofs},
      {"profiles", target.profiles}};
}

State state_from(const std::string& text) {
  for (const State state :
       {State::kMeasured, State::kBlocked, State::kFailed, State::kSkipped, State::kPartial}) {
    if (state_text(state) == text) return state;
  }
  throw DataError("[bench.results] there is no state '{}'", text);
}

TargetResult target_from(const Json& json) {
  TargetResult target;
  json.at("name").get_to(target.name);
  json.at("mode").get_to(target.mode);
  json.at("summary").get_to(target.summary);
  json.at("difference").get_to(target.difference);
  json.at("expected").get_to(target.expected);
  target.state = state_from(json.at("state"));
  json.at("reason").get_to(target.reason);
  json.at("ranks").get_to(target.ranks);
  json.at("threads").get_to(target.threads);
  json.at("steps").get_to(target.steps);
  json.at("warm_up").get_to(target.warm_up);
  json.at("blocks").get_to(target.blocks);
  target.statistic = json.at("statistic") == "median" ? Statistic::kMedian : Statistic::kMean;
  json.at("shows_memory").get_to(target.shows_memory);
  for (const Json& arm : json.at("arms")) target.arms.push_back(arm_from(arm));
  json.at("keys").get_to(target.keys);
  for (const Json& check : json.at("checks"))
    target.checks.push_back(
        {.what = check.at("what"), .holds = check.at("holds"), .detail = check.at("detail")});
  json.at("samples").get_to(target.samples);
  json.at("twins").get_to(target.twins);
  if (json.contains("proofs")) json.at("proofs").get_to(target.proofs);
  if (json.contains("profiles")) json.at("profiles").get_to(target.profiles);
  const auto count = static_cast<int64_t>(target.arms.size());
  for (const ArmProfile& profile : target.profiles) {
    if (profile.arm < 0 || profile.arm >= count)
      throw DataError("[bench.results] {} has a profile of arm {}, but {} arms", target.name, profile.arm,
                      count);
  }
  for (const Sample& sample : target.samples) {
    if (sample.slot.arm < 0 || sample.slot.arm >= count)
      throw DataError("[bench.results] {} has a run of arm {}, but {} arms", target.name, sample.slot.arm,
                      count);
  }
  return target;
}

Json machine_json(const Machine& machine) {
  return {{"hostname", machine.hostname}, {"cpu", machine.cpu},
          {"kernel", machine.kernel},     {"device", machine.device},
          {"cores", machine.cores},       {"memory_bytes", machine.memory_bytes},
          {"load", machine.load},         {"hardware", machine.hardware()}};
}

/// Where a roof was measured: counts, rates and clocks that hold together leave no kernel above it.
void add_roof_check(TargetResult& target) {
  bool has_roof = false;
  std::string above;
  for (const ArmProfile& profile : target.profiles) {
    if (!profile.roof || !profile.error.empty()) continue;
    has_roof = true;
    const std::string why = above_roof(profile);
    if (!why.empty() && above.empty())
      above = fmt::format("{}: {}", target.arms[static_cast<size_t>(profile.arm)].name, why);
  }
  if (!has_roof) return;
  target.checks.push_back(
      {.what = "no kind of kernel is faster than this machine was measured to be",
       .holds = above.empty(),
       .detail = above.empty() ? fmt::format("shares of the roof are below {:g}", 1.0 + kRoofNoise) : above});
}

Machine machine_from(const Json& json) {
  return {.hostname = json.at("hostname"),
          .cpu = json.at("cpu"),
          .kernel = json.at("kernel"),
          .device = json.at("device"),
          .cores = json.at("cores"),
          .memory_bytes = json.at("memory_bytes"),
          .load = json.at("load")};
}

}  // namespace

std::string state_text(State state) {
  switch (state) {
    case State::kMeasured:
      return "measured";
    case State::kBlocked:
      return "blocked";
    case State::kFailed:
      return "failed";
    case State::kSkipped:
      return "skipped";
    case State::kPartial:
      return "partial";
  }
  return "";
}

std::string Machine::hardware() const {
  return fmt::format("{}, {}, {} cores", device, cpu.empty() ? "unknown processor" : cpu, cores);
}

std::vector<Score> score(const TargetResult& target) {
  return score(target.arms, target.samples, target.statistic, target.warm_up,
               target.state == State::kMeasured);
}

bool needs_proofs(const TargetResult& target) {
  return std::ranges::any_of(target.samples, [&](const Sample& sample) {
    const Sample& first = target.samples.front();
    const bool owes_weights = target.arms[static_cast<size_t>(sample.slot.arm)].owed == Owed::kSameWeights;
    const bool varies = !sample.why_bits_vary.empty() || !first.why_bits_vary.empty();
    return owes_weights && varies && sample.weights_digest != first.weights_digest;
  });
}

void judge(TargetResult& target, const std::string& why_no_twin) {
  target.checks = verify({.arms = &target.arms,
                          .samples = &target.samples,
                          .twin = target.twins.empty() ? nullptr : &target.twins.front(),
                          .why_no_twin = why_no_twin,
                          .proofs = &target.proofs,
                          .steps = target.steps});
  add_roof_check(target);
  target.state = all_hold(target.checks) ? State::kMeasured : State::kBlocked;
  if (target.state == State::kMeasured) return;
  const Check& failed = *std::ranges::find(target.checks, false, &Check::holds);
  target.reason = fmt::format("'{}' does not hold: {}", failed.what, failed.detail);
}

int exit_code(const Results& results) {
  const auto any = [&](State state) {
    return std::ranges::find(results.targets, state, &TargetResult::state) != results.targets.end();
  };
  if (any(State::kFailed) || any(State::kPartial)) return static_cast<int>(ExitCode::kFailed);
  if (any(State::kBlocked)) return static_cast<int>(ExitCode::kComparison);
  return static_cast<int>(any(State::kMeasured) ? ExitCode::kOk : ExitCode::kEnvironment);
}

std::string to_json_text(const Results& results) {
  Json targets = Json::array();
  for (const TargetResult& target : results.targets) targets.push_back(target_json(target));
  return Json{{"schema", kResultsSchema},
              {"command", results.command},
              {"started", results.started},
              {"version", results.version},
              {"commit", results.commit},
              {"worker_digest", results.worker_digest},
              {"machine", machine_json(results.machine)},
              {"profile", results.profile},
              {"environment", results.environment},
              {"request", results.request},
              {"complete", results.complete},
              {"targets", targets}}
             .dump(1) +
         "\n";
}

Results results_from_json(const std::string& text, const std::string& path) {
  try {
    const Json json = Json::parse(text);
    if (json.at("schema") != kResultsSchema)
      throw DataError("[bench.results] {} has the schema {}, not {}; measure again", path,
                      json.at("schema").dump(), kResultsSchema);
    Results results{.command = json.at("command"),
                    .started = json.at("started"),
                    .version = json.at("version"),
                    .commit = json.at("commit"),
                    .worker_digest = json.at("worker_digest"),
                    .machine = machine_from(json.at("machine")),
                    .profile = json.at("profile"),
                    .environment = json.at("environment"),
                    .request = json.at("request"),
                    .complete = json.at("complete"),
                    .targets = {}};
    for (const Json& target : json.at("targets")) results.targets.push_back(target_from(target));
    return results;
  } catch (const Json::exception& error) {
    throw DataError("[bench.results] {} is no results.json of a bench ({}); measure again", path,
                    error.what());
  }
}

Results read_results(const std::string& path) {
  const std::string file = std::filesystem::is_directory(path) ? path + "/results.json" : path;
  if (!std::filesystem::is_regular_file(file))
    throw ConfigError("[bench.results] there is no {}; name the folder that 'trireme bench run' has written",
                      file);
  return results_from_json(read_file(file), file);
}

}  // namespace trireme::bench
