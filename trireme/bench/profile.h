#pragma once
// Profiles of arms: where a step's time goes by kind of kernel, and how near each kind comes to what the
// machine was measured to do (the roofline model: Williams, Waterman and Patterson 2009).
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/sink.h"

namespace trireme::bench {

/// The depth of a profile: the records of a bench beside times.
enum class Depth {
  kNone,      ///< nothing
  kMinimal,   ///< memory, bytes sent and waiting, of the runs that are timed
  kDeep,      ///< also a traced run of each arm
  kRoofline,  ///< also the work of each kind of kernel, beside the rates of this machine
};
inline constexpr std::string_view kDepthNames[] = {"none", "minimal", "deep", "roofline"};
/// Throws ConfigError that names the nearest word.
Depth depth_of(const std::string& word);

/// Work of a kind of kernel on rank 0 in a step, from the shapes of the plan.
struct CountedWork {
  std::string group;
  double flops = 0.0, bytes = 0.0;  ///< 0: not counted
};

/// The most that this machine was measured to do, on each of `ranks` ranks at once.
struct Roof {
  std::string origin;               ///< the file of rates
  int64_t ranks = 0;                ///< that were measured at once
  double flops_per_s = 0.0;         ///< of its fastest product
  double bytes_per_s = 0.0;         ///< of its fastest pass over memory
  double cached_bytes_per_s = 0.0;  ///< of its fastest pass over what caches hold; 0: not measured
};

/// The traced run of one arm.
struct ArmProfile {
  int64_t arm = 0;
  std::string directory = {}, trace = {};  ///< of the run, and of what Perfetto opens
  std::string error = {};                  ///< why there is none; empty: there is
  KernelProfile kernels = {};
  std::vector<CountedWork> counted = {};  ///< of Depth::kRoofline
  std::string why_not_counted = {};
  std::optional<Roof> roof = {};
  std::string why_no_roof = {};
};

/// A kind of kernel beside the roof.
struct GroupRates {
  KernelGroup group = {};
  double flops = 0.0, bytes = 0.0;  ///< a step; 0: not counted
  double intensity = 0.0;           ///< FLOPs a byte; 0: one of them is not counted
  double flops_per_s = 0.0, bytes_per_s = 0.0;
  /// Time that the roof would take over the time that it took; 0: nothing is counted, or there is no roof.
  double share = 0.0;
  std::string bound = {};  ///< what the roof is there: "products", "memory" or "caches"
};

/// The most by which a share may be above 1: roof and kernels are measured at different times.
inline constexpr double kRoofNoise = 0.1;

/// Rows of a profile, longest first. A kind is bound by the slower of its FLOPs and its bytes. One that is
/// faster than memory has its bytes from caches, whose rate then is its roof.
std::vector<GroupRates> rates_of(const ArmProfile& profile);

/// The kind whose share is above 1 by more than the noise, in a sentence; empty: there is none.
std::string above_roof(const ArmProfile& profile);

void to_json(nlohmann::json& json, const ArmProfile& profile);
void from_json(const nlohmann::json& json, ArmProfile& profile);

}  // namespace trireme::bench
