#include "trireme/bench/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::bench {
namespace {

using Json = nlohmann::json;

/// The seconds that work takes at a roof; 0: nothing is counted.
struct RoofSeconds {
  double products = 0.0, memory = 0.0, caches = 0.0;
};

RoofSeconds seconds_at(const Roof& roof, const GroupRates& work) {
  RoofSeconds seconds;
  if (roof.flops_per_s > 0.0) seconds.products = work.flops / roof.flops_per_s;
  if (roof.bytes_per_s > 0.0) seconds.memory = work.bytes / roof.bytes_per_s;
  // Caches are no slower than what lies behind them.
  const double cached = std::max(roof.cached_bytes_per_s, roof.bytes_per_s);
  if (cached > 0.0) seconds.caches = work.bytes / cached;
  return seconds;
}

void add_share(GroupRates& rates, const Roof& roof) {
  const RoofSeconds at = seconds_at(roof, rates);
  const double took = 1e-3 * rates.group.ms;
  if (took <= 0.0 || std::max(at.products, at.memory) <= 0.0) return;
  const bool from_memory = at.memory <= (1.0 + kRoofNoise) * took;
  const double bytes = from_memory ? at.memory : at.caches;
  rates.share = std::max(at.products, bytes) / took;
  rates.bound = at.products >= bytes ? "products" : (from_memory ? "memory" : "caches");
}

Json groups_json(const KernelProfile& kernels) {
  Json groups = Json::array();
  for (const KernelGroup& group : kernels.groups)
    groups.push_back({{"name", group.name}, {"ms", group.ms}, {"calls", group.calls}});
  return groups;
}

Json number_or_null(double value) {
  return value > 0.0 ? Json(value) : Json();
}

/// Numbers that follow from the others, for readers of the file.
Json rates_json(const ArmProfile& profile) {
  Json all = Json::array();
  for (const GroupRates& one : rates_of(profile))
    all.push_back({{"group", one.group.name},
                   {"flops", number_or_null(one.flops)},
                   {"bytes", number_or_null(one.bytes)},
                   {"flops_per_byte", number_or_null(one.intensity)},
                   {"flops_per_s", number_or_null(one.flops_per_s)},
                   {"bytes_per_s", number_or_null(one.bytes_per_s)},
                   {"share_of_roof", number_or_null(one.share)},
                   {"bound", one.bound}});
  return all;
}

}  // namespace

Depth depth_of(const std::string& word) {
  const auto found = std::ranges::find(kDepthNames, word);
  if (found != std::end(kDepthNames)) return static_cast<Depth>(found - std::begin(kDepthNames));
  const std::vector<std::string> names(std::begin(kDepthNames), std::end(kDepthNames));
  const std::string near = nearest_name(word, names);
  throw ConfigError("[cli.bench] --profile is '{}'; {}choose {}", word,
                    near.empty() ? "" : fmt::format("did you mean '{}'? ", near), join(names, ", "));
}

std::vector<GroupRates> rates_of(const ArmProfile& profile) {
  std::vector<GroupRates> all;
  for (const KernelGroup& group : profile.kernels.groups) {
    GroupRates& one = all.emplace_back();
    one.group = group;
    const auto work = std::ranges::find(profile.counted, group.name, &CountedWork::group);
    if (work == profile.counted.end() || group.ms <= 0.0) continue;
    one.flops = work->flops;
    one.bytes = work->bytes;
    if (one.bytes > 0.0) one.intensity = one.flops / one.bytes;
    one.flops_per_s = one.flops / (1e-3 * group.ms);
    one.bytes_per_s = one.bytes / (1e-3 * group.ms);
    if (profile.roof) add_share(one, *profile.roof);
  }
  return all;
}

std::string above_roof(const ArmProfile& profile) {
  for (const GroupRates& one : rates_of(profile)) {
    if (one.share <= 1.0 + kRoofNoise) continue;
    return fmt::format(
        "{} took {:.3f} ms a step, but at the rates of {} ({}) it takes {:.3f} ms, {:.2f} times as long; "
        "measure those again while nothing else runs",
        one.group.name, one.group.ms, profile.roof->origin, one.bound, one.group.ms * one.share, one.share);
  }
  return "";
}

void to_json(Json& json, const ArmProfile& profile) {
  Json counted = Json::array();
  for (const CountedWork& one : profile.counted)
    counted.push_back({{"group", one.group}, {"flops", one.flops}, {"bytes", one.bytes}});
  json = {{"arm", profile.arm},
          {"directory", profile.directory},
          {"trace", profile.trace},
          {"error", profile.error},
          {"of", profile.kernels.of_gpu ? "GPU kernels" : "CPU operators"},
          {"steps", profile.kernels.steps},
          {"step_ms", profile.kernels.step_ms},
          {"idle_ms", profile.kernels.idle_ms},
          {"groups", groups_json(profile.kernels)},
          {"counted", counted},
          {"why_not_counted", profile.why_not_counted},
          {"why_no_roof", profile.why_no_roof},
          {"rates", rates_json(profile)}};
  if (profile.roof)
    json["roof"] = {{"origin", profile.roof->origin},
                    {"ranks", profile.roof->ranks},
                    {"flops_per_s", profile.roof->flops_per_s},
                    {"bytes_per_s", profile.roof->bytes_per_s},
                    {"cached_bytes_per_s", profile.roof->cached_bytes_per_s}};
}

void from_json(const Json& json, ArmProfile& profile) {
  json.at("arm").get_to(profile.arm);
  json.at("directory").get_to(profile.directory);
  json.at("trace").get_to(profile.trace);
  json.at("error").get_to(profile.error);
  profile.kernels = {.of_gpu = json.at("of") == "GPU kernels",
                     .steps = json.at("steps"),
                     .groups = {},
                     .step_ms = json.at("step_ms"),
                     .idle_ms = json.at("idle_ms")};
  for (const Json& group : json.at("groups"))
    profile.kernels.groups.push_back(
        {.name = group.at("name"), .ms = group.at("ms"), .calls = group.at("calls")});
  profile.counted.clear();
  for (const Json& one : json.at("counted"))
    profile.counted.push_back({.group = one.at("group"), .flops = one.at("flops"), .bytes = one.at("bytes")});
  json.at("why_not_counted").get_to(profile.why_not_counted);
  json.at("why_no_roof").get_to(profile.why_no_roof);
  profile.roof.reset();
  if (!json.contains("roof")) return;
  const Json& roof = json.at("roof");
  profile.roof = {.origin = roof.at("origin"),
                  .ranks = roof.at("ranks"),
                  .flops_per_s = roof.at("flops_per_s"),
                  .bytes_per_s = roof.at("bytes_per_s"),
                  .cached_bytes_per_s = roof.at("cached_bytes_per_s")};
}

}  // namespace trireme::bench
