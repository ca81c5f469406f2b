#pragma once
// One measured run: what its directory says about the time it took, and about what it trained.
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace trireme::bench {

/// Where a run stands among those of its target.
struct Slot {
  int64_t block = 0;  ///< counted from 0
  int64_t half = 0;   ///< 0: on the way from the reference to the last arm; 1: on the way back
  int64_t arm = 0;
  bool operator==(const Slot&) const = default;
};

/// The order of all runs: in each block all arms, and then all of them backwards, so that a machine that
/// grows slower or faster does so for all arms alike: A B B A.
std::vector<Slot> run_order(int64_t arms, int64_t blocks);

struct Sample {
  Slot slot;
  int code = 0;           ///< exit code of the run
  std::string directory;  ///< of the run; empty: it could not be started
  std::string error;      ///< why its records say nothing; empty: they do
  /// The workload: keys of the model, data, optimizer and seed from config.yaml, and what was recorded of
  /// steps and tokens.
  std::map<std::string, std::string> workload;
  std::vector<double> losses, step_ms;  ///< of all steps, warm-up included; losses are finite
  std::vector<double> grad_norms;  ///< of all steps, before they are clipped; empty: not every step has one
  std::string weights_digest, why_bits_vary;
  double wall_s = 0.0;  ///< of training, by the run's own clock
  int64_t peak_bytes = 0, state_bytes = 0, sent_bytes = 0;
  int64_t predicted_sent_bytes = -1;                  ///< -1: no formula tells
  double communication_ms = -1.0, exposed_ms = -1.0;  ///< medians of measured steps; -1: not measured
  std::string compute;                                ///< precision.compute
  std::string mesh;
};

/// Reads the files that a run has left. Throws nothing for a run that is damaged: that is Sample::error.
Sample read_sample(const std::string& run_directory, const Slot& slot, int code);

/// "tokens a step", among the workload.
inline constexpr const char* kTokensKey = "tokens a step";

/// Whether a key of config.yaml says what is trained. The others say how, and may differ between arms.
bool is_of_workload(const std::string& key);
/// XXH3-64 of the workload, 16 hex digits.
std::string workload_hash(const std::map<std::string, std::string>& workload);

/// Steps behind the warm-up.
std::vector<double> steady(const Sample& sample, int64_t warm_up);

void to_json(nlohmann::json& json, const Sample& sample);
void from_json(const nlohmann::json& json, Sample& sample);

}  // namespace trireme::bench
