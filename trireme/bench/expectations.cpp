#include "trireme/bench/expectations.h"

#include <algorithm>
#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"

namespace trireme::bench {
namespace {

using Json = nlohmann::json;

constexpr const char* kExpectationsSchema = "trireme.bench_expectations/1";

bool is_same_arm(const Expectation& a, const Expectation& b) {
  return a.hardware == b.hardware && a.target == b.target && a.mode == b.mode && a.arm == b.arm &&
         a.setup == b.setup;
}

Json expectation_json(const Expectation& one) {
  return {{"hardware", one.hardware}, {"target", one.target},       {"mode", one.mode},
          {"arm", one.arm},           {"setup", one.setup},         {"ms_low", one.ms.low},
          {"ms_high", one.ms.high},   {"ratio_low", one.ratio.low}, {"ratio_high", one.ratio.high},
          {"accepted", one.accepted}, {"commit", one.commit},       {"results", one.results}};
}

/// Times of other ranks, threads, keys or models say nothing about these.
std::string setup_of(const TargetResult& target, size_t arm) {
  std::string text = fmt::format("{} ranks, {} threads, {} steps behind {}\n", target.ranks, target.threads,
                                 target.steps, target.warm_up);
  if (arm < target.keys.size()) text += join(target.keys[arm], "\n");
  const auto sample = std::ranges::find(target.samples, static_cast<int64_t>(arm),
                                        [](const Sample& one) { return one.slot.arm; });
  if (sample != target.samples.end()) text += workload_hash(sample->workload);
  return hex64(xxh3(text));
}

Expectation expectation_from(const Json& json) {
  return {.hardware = json.at("hardware"),
          .target = json.at("target"),
          .mode = json.at("mode"),
          .arm = json.at("arm"),
          .setup = json.at("setup"),
          .ms = {.low = json.at("ms_low"), .high = json.at("ms_high")},
          .ratio = {.low = json.at("ratio_low"), .high = json.at("ratio_high")},
          .accepted = json.at("accepted"),
          .commit = json.at("commit"),
          .results = json.at("results")};
}

}  // namespace

std::vector<Expectation> read_expectations(const std::string& path) {
  std::vector<Expectation> all;
  if (!std::filesystem::exists(path)) return all;
  try {
    const Json json = Json::parse(read_file(path));
    if (json.at("schema") != kExpectationsSchema)
      throw DataError("[bench.expectations] {} has the schema {}, not {}; name another file", path,
                      json.at("schema").dump(), kExpectationsSchema);
    for (const Json& one : json.at("arms")) all.push_back(expectation_from(one));
  } catch (const Json::exception& error) {
    throw DataError("[bench.expectations] {} is no file of expectations ({}); name another file", path,
                    error.what());
  }
  return all;
}

void write_expectations(const std::string& path, const std::vector<Expectation>& all) {
  Json arms = Json::array();
  for (const Expectation& one : all) arms.push_back(expectation_json(one));
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) make_directories(folder);
  write_file_atomic(path, Json{{"schema", kExpectationsSchema}, {"arms", arms}}.dump(1) + "\n");
}

std::vector<Expectation> expectations_of(const Results& results, const std::string& folder,
                                         const std::string& now) {
  std::vector<Expectation> all;
  for (const TargetResult& target : results.targets) {
    if (target.state != State::kMeasured) continue;
    const std::vector<Score> scores = score(target);
    for (size_t arm = 0; arm < scores.size(); ++arm) {
      const auto [low, high] = std::ranges::minmax(scores[arm].values);
      all.push_back({.hardware = results.machine.hardware(),
                     .target = target.name,
                     .mode = target.mode,
                     .arm = target.arms[arm].name,
                     .setup = setup_of(target, arm),
                     .ms = {.low = low, .high = high},
                     .ratio = scores[arm].interval,
                     .accepted = now,
                     .commit = results.commit,
                     .results = folder});
    }
  }
  return all;
}

std::vector<Expectation> merged(std::vector<Expectation> all, const std::vector<Expectation>& more) {
  for (const Expectation& one : more) {
    std::erase_if(all, [&](const Expectation& old) { return is_same_arm(old, one); });
    all.push_back(one);
  }
  return all;
}

std::vector<Held> hold_against(const std::vector<Expectation>& accepted,
                               const std::vector<Expectation>& now) {
  std::vector<Held> all;
  for (const Expectation& one : now) {
    Held held{.now = one, .before = {}};
    const auto found =
        std::ranges::find_if(accepted, [&](const Expectation& old) { return is_same_arm(old, one); });
    held.is_known = found != accepted.end();
    if (held.is_known) {
      held.before = *found;
      held.slower = one.ms.low > found->ms.high;
      held.less = one.ratio.high < found->ratio.low;
    }
    all.push_back(std::move(held));
  }
  return all;
}

}  // namespace trireme::bench
