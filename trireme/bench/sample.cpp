#include "trireme/bench/sample.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/report/run_record.h"
#include "trireme/report/step_times.h"

namespace trireme::bench {
namespace {

/// Tokens of one step, where all steps have as many; empty: they do not.
std::string tokens_a_step(const report::Curve& tokens) {
  if (tokens.empty()) return "";
  const double first = tokens.y.front();
  for (size_t i = 1; i < tokens.size(); ++i) {
    if (tokens.y[i] - tokens.y[i - 1] != first) return "";
  }
  return fmt::format("{:.0f}", first);
}

double median_or_none(const report::Curve& curve) {
  return report::median(curve.y).value_or(-1.0);
}

/// The time that training waited for a save counts for the step that was saved, which is over when the save
/// begins.
void add_saves(const report::RunRecord& run, std::vector<double>& step_ms) {
  const report::Curve &saves = run.metrics.curve("checkpoint_ms"), &steps = run.metrics.curve("step_ms");
  for (size_t save = 0; save < saves.size(); ++save) {
    const auto step = std::ranges::find(steps.x, saves.x[save]);
    if (step != steps.x.end()) step_ms[static_cast<size_t>(step - steps.x.begin())] += saves.y[save];
  }
}

void take_steps(const report::RunRecord& run, Sample& sample) {
  const report::Curve& losses = run.metrics.curve("loss");
  sample.step_ms = run.metrics.curve("step_ms").y;
  add_saves(run, sample.step_ms);
  for (size_t i = 0; i < losses.size() && sample.error.empty(); ++i) {
    if (!std::isfinite(losses.y[i]))
      sample.error = fmt::format("the loss of step {:.0f} is {}", losses.x[i], losses.y[i]);
  }
  if (sample.error.empty()) sample.losses = losses.y;
  const report::Curve& norms = run.metrics.curve("grad_norm");
  if (norms.x == losses.x) sample.grad_norms = norms.y;
  sample.workload[kTokensKey] = tokens_a_step(run.metrics.curve("tokens"));
  sample.communication_ms = median_or_none(run.metrics.curve("communication_ms"));
  sample.exposed_ms = median_or_none(run.metrics.curve("exposed_ms"));
}

void take_summary(const report::RunRecord& run, Sample& sample) {
  if (!run.summary) {
    sample.error = "it has left no summary.json";
    return;
  }
  const RunSummary& summary = *run.summary;
  sample.weights_digest = summary.weights_digest;
  sample.why_bits_vary = summary.why_bits_vary;
  sample.wall_s = summary.wall_s;
  sample.peak_bytes = summary.peak_bytes;
  sample.state_bytes = summary.cost.measured.total();
  sample.sent_bytes = summary.cost.measured_wire_bytes;
  sample.predicted_sent_bytes = summary.cost.predicted_wire_bytes.value_or(-1);
}

}  // namespace

std::vector<Slot> run_order(int64_t arms, int64_t blocks) {
  std::vector<Slot> order;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t arm = 0; arm < arms; ++arm) order.push_back({.block = block, .half = 0, .arm = arm});
    for (int64_t arm = arms - 1; arm >= 0; --arm) order.push_back({.block = block, .half = 1, .arm = arm});
  }
  return order;
}

Sample read_sample(const std::string& run_directory, const Slot& slot, int code) {
  Sample sample;
  sample.slot = slot;
  sample.code = code;
  sample.directory = run_directory;
  if (run_directory.empty()) return sample;
  try {
    const report::RunRecord run = report::read_run(run_directory);
    for (const report::ConfigEntry& entry : run.config) {
      if (is_of_workload(entry.key)) sample.workload[entry.key] = entry.value;
    }
    sample.compute = run.config_value("precision.compute");
    sample.mesh = run.facts.mesh;
    take_steps(run, sample);
    if (sample.error.empty() && code == 0) take_summary(run, sample);
    if (sample.error.empty() && !run.metrics.damage.empty()) sample.error = run.metrics.damage.front();
  } catch (const Error& error) {
    sample.error = error.what();
  }
  return sample;
}

bool is_of_workload(const std::string& key) {
  if (key == "model.attention" || key == "data.threads") return false;
  return key == "seed" || key == "train.grad_clip" || key.starts_with("model.") ||
         key.starts_with("optim.") || key.starts_with("data.");
}

std::string workload_hash(const std::map<std::string, std::string>& workload) {
  std::string text;
  for (const auto& [key, value] : workload) text += fmt::format("{}={}\n", key, value);
  return hex64(xxh3(text));
}

std::vector<double> steady(const Sample& sample, int64_t warm_up) {
  const auto skipped = std::min<size_t>(static_cast<size_t>(warm_up), sample.step_ms.size());
  return {sample.step_ms.begin() + static_cast<std::ptrdiff_t>(skipped), sample.step_ms.end()};
}

void to_json(nlohmann::json& json, const Sample& sample) {
  json = {{"block", sample.slot.block},
          {"half", sample.slot.half},
          {"arm", sample.slot.arm},
          {"code", sample.code},
          {"directory", sample.directory},
          {"error", sample.error},
          {"workload", sample.workload},
          {"losses", sample.losses},
          {"step_ms", sample.step_ms},
          {"grad_norms", sample.grad_norms},
          {"weights_digest", sample.weights_digest},
          {"why_bits_vary", sample.why_bits_vary},
          {"wall_s", sample.wall_s},
          {"peak_bytes", sample.peak_bytes},
          {"state_bytes", sample.state_bytes},
          {"sent_bytes", sample.sent_bytes},
          {"predicted_sent_bytes", sample.predicted_sent_bytes},
          {"communication_ms", sample.communication_ms},
          {"exposed_ms", sample.exposed_ms},
          {"compute", sample.compute},
          {"mesh", sample.mesh}};
}

void from_json(const nlohmann::json& json, Sample& sample) {
  sample.slot = {.block = json.at("block"), .half = json.at("half"), .arm = json.at("arm")};
  json.at("code").get_to(sample.code);
  json.at("directory").get_to(sample.directory);
  json.at("error").get_to(sample.error);
  json.at("workload").get_to(sample.workload);
  json.at("losses").get_to(sample.losses);
  json.at("step_ms").get_to(sample.step_ms);
  if (json.contains("grad_norms")) json["grad_norms"].get_to(sample.grad_norms);  // older records have none
  json.at("weights_digest").get_to(sample.weights_digest);
  json.at("why_bits_vary").get_to(sample.why_bits_vary);
  json.at("wall_s").get_to(sample.wall_s);
  json.at("peak_bytes").get_to(sample.peak_bytes);
  json.at("state_bytes").get_to(sample.state_bytes);
  json.at("sent_bytes").get_to(sample.sent_bytes);
  json.at("predicted_sent_bytes").get_to(sample.predicted_sent_bytes);
  json.at("communication_ms").get_to(sample.communication_ms);
  json.at("exposed_ms").get_to(sample.exposed_ms);
  json.at("compute").get_to(sample.compute);
  json.at("mesh").get_to(sample.mesh);
}

}  // namespace trireme::bench
