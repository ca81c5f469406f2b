#include "trireme/report/run_record.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/report/recorded_number.h"

namespace trireme::report {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// A page with more than this in one picture or text is none that a browser opens gladly.
constexpr uintmax_t kLargestPicture = 8 << 20, kAllPictures = 32 << 20, kLargestText = 256 << 10;
constexpr std::streamoff kLogEndBytes = 16 << 10;
constexpr size_t kLogEndLines = 30;

std::string string_at(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
}

/// 0 where there is none.
int64_t integer_at(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

std::optional<double> number_at(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found == json.end() ? std::nullopt : recorded_number(*found);
}

/// The object below `key`; an empty one where there is none.
Json object_at(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_object() ? *found : Json::object();
}

RunFacts read_facts(const Json& manifest) {
  return {.version = string_at(manifest, "version"),
          .torch = string_at(manifest, "torch"),
          .command = string_at(manifest, "command"),
          .hostname = string_at(manifest, "hostname"),
          .cpu = string_at(manifest, "cpu"),
          .kernel = string_at(manifest, "kernel"),
          .device = string_at(manifest, "device"),
          .mesh = string_at(manifest, "mesh"),
          .started = string_at(manifest, "started"),
          .cores = integer_at(manifest, "cores"),
          .memory_bytes = integer_at(manifest, "memory_bytes"),
          .ranks = integer_at(manifest, "ranks")};
}

RunCost::State state_at(const Json& json, const char* key) {
  const Json state = object_at(json, key);
  return {.parameters = integer_at(state, "parameters"),
          .gradients = integer_at(state, "gradients"),
          .optimizer = integer_at(state, "optimizer")};
}

RunCost read_run_cost(const Json& json) {
  const Json state = object_at(json, "state_bytes"), wire = object_at(json, "wire_bytes_per_step"),
             activations = object_at(json, "activation_bytes"),
             communication = object_at(json, "communication_ms");
  RunCost cost;
  cost.predicted = state_at(state, "predicted");
  cost.measured = state_at(state, "measured");
  if (const auto sent = wire.find("predicted"); sent != wire.end() && sent->is_null())
    cost.predicted_wire_bytes.reset();
  else
    cost.predicted_wire_bytes = integer_at(wire, "predicted");
  cost.measured_wire_bytes = integer_at(wire, "measured");
  cost.predicted_activation_bytes = integer_at(activations, "predicted");
  if (const int64_t bytes = integer_at(activations, "measured"); bytes > 0)
    cost.measured_activation_bytes = bytes;
  cost.predicted_gathered_bytes = integer_at(object_at(json, "gathered_bytes"), "predicted");
  cost.baseline_bytes = integer_at(json, "baseline_bytes");
  cost.predicted_peak_bytes = integer_at(json, "predicted_peak_bytes");
  cost.communication_ms = number_at(communication, "total");
  cost.exposed_ms = number_at(communication, "exposed");
  return cost;
}

KernelProfile read_profile(const Json& json) {
  KernelProfile profile{.of_gpu = string_at(json, "of") == "GPU kernels",
                        .steps = integer_at(json, "steps"),
                        .groups = {},
                        .step_ms = number_at(json, "step_ms").value_or(0.0),
                        .idle_ms = number_at(json, "idle_ms").value_or(0.0)};
  const auto groups = json.find("groups");
  if (groups == json.end() || !groups->is_array()) return profile;
  for (const Json& group : *groups) {
    if (!group.is_object()) continue;
    profile.groups.push_back({.name = string_at(group, "name"),
                              .ms = number_at(group, "ms").value_or(0.0),
                              .calls = integer_at(group, "calls")});
  }
  return profile;
}

/// Reads a summary of any version: fields that are missing keep the defaults of RunSummary.
RunSummary read_summary(const Json& json) {
  RunSummary summary;
  summary.steps = integer_at(json, "steps");
  summary.final_loss = number_at(json, "final_loss").value_or(std::numeric_limits<double>::quiet_NaN());
  summary.final_val_loss = number_at(json, "final_val_loss");
  summary.tokens_per_s = number_at(json, "tokens_per_s").value_or(0.0);
  summary.steps_per_s = number_at(json, "steps_per_s").value_or(0.0);
  summary.peak_bytes = integer_at(json, "peak_bytes");
  summary.active_bytes = integer_at(json, "active_bytes");
  summary.reserved_bytes = integer_at(json, "reserved_bytes");
  if (const auto ranks = json.find("peak_bytes_by_pp_rank"); ranks != json.end() && ranks->is_array()) {
    for (const Json& bytes : *ranks) {
      if (bytes.is_number_integer()) summary.peak_bytes_by_pp_rank.push_back(bytes.get<int64_t>());
    }
  }
  summary.seconds_to_first_step = number_at(json, "seconds_to_first_step").value_or(0.0);
  summary.wall_s = number_at(json, "wall_s").value_or(0.0);
  summary.weights_digest = string_at(json, "weights_digest");
  summary.why_bits_vary = string_at(json, "why_bits_vary");
  summary.cost = read_run_cost(json);
  summary.sample = string_at(json, "sample");
  summary.weights_path = string_at(json, "weights");
  const Json best = object_at(json, "best_weights");
  summary.best_weights_path = string_at(best, "path");
  summary.best_step = integer_at(best, "step");
  summary.resumed_at = integer_at(json, "resumed_at");
  const Json checkpoints = object_at(json, "checkpoints");
  summary.checkpoints = integer_at(checkpoints, "written");
  summary.checkpoints_late = integer_at(checkpoints, "late");
  summary.checkpoints_failed = integer_at(checkpoints, "failed");
  summary.stop_signal = static_cast<int>(integer_at(json, "stop_signal"));
  if (json.contains("profile")) summary.profile = read_profile(object_at(json, "profile"));
  if (json.contains("early_stop")) {
    const Json end = object_at(json, "early_stop");
    const std::string monitor = string_at(end, "monitor"), metric = monitor.empty() ? "loss" : monitor;
    summary.early_end = {.step = integer_at(end, "step"),
                         .best_step = integer_at(end, "best_step"),
                         .best_value = number_at(end, ("best_val_" + metric).c_str()),
                         .validations = integer_at(end, "validations"),
                         .metric = metric,
                         .higher_is_better = end.contains("higher_is_better"),
                         .reason = string_at(end, "reason")};
  }
  return summary;
}

std::string utc_text(std::time_t at) {
  std::tm parts{};
  ::gmtime_r(&at, &parts);
  char text[32];
  const size_t size = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return {text, size};
}

/// The name without quotes where it needs none.
std::string unquoted(const std::string& value) {
  const bool quoted = value.size() >= 2 && value.front() == '"' && value.back() == '"';
  return quoted ? value.substr(1, value.size() - 2) : value;
}

/// Reads pieces of a run directory; what cannot be read becomes a problem of the record.
class RunReader {
 public:
  explicit RunReader(const RunDirectory& run) : run_(run) {}

  RunRecord read() {
    record_.path = run_.path();
    record_.folder = fs::path(run_.path()).filename().string();
    record_.facts = read_facts(Json::parse(read_file(run_.file("manifest.json")), nullptr, false));
    record_.attempts = run_.attempts();
    record_.running = run_.holder().has_value();
    record_.config_yaml = text_of("config.yaml");
    record_.config = read_config_entries(record_.config_yaml);
    record_.name = unquoted(record_.config_value("name"));
    if (record_.name.empty()) record_.name = record_.folder;
    take_metrics();
    take_summary();
    take_numbered("config.attempt-", ".yaml", record_.earlier_configs);
    take_numbered("crash-", ".txt", record_.crash_reports);
    take_log_ends();
    record_.error = record_.last_attempt().error;
    if (record_.error.empty()) record_.error = error_in_logs();
    record_.has_checkpoints = finds_checkpoints();
    take_pictures();
    return std::move(record_);
  }

 private:
  void note(std::string problem) { record_.problems.push_back(std::move(problem)); }

  bool has(const std::string& name) const {
    std::error_code ignored;
    return fs::exists(run_.file(name), ignored);
  }

  /// The text of a file of the run; empty where there is none.
  std::string text_of(const std::string& name) {
    if (!has(name)) return {};
    try {
      return read_file(run_.file(name));
    } catch (const EnvironmentError& error) {
      note(fmt::format("{} cannot be read: {}.", name, error.what()));
      return {};
    }
  }

  void take_metrics() {
    const std::string name = "metrics.jsonl";
    if (!has(name)) return;
    Metrics& metrics = record_.metrics = read_metrics(run_.file(name));
    std::error_code error;
    const auto written = fs::last_write_time(run_.file(name), error);
    if (!error) {
      const auto at = std::chrono::file_clock::to_sys(written);
      record_.written = utc_text(std::chrono::system_clock::to_time_t(
          std::chrono::time_point_cast<std::chrono::system_clock::duration>(at)));
    }
    if (metrics.damaged_lines > 0) {
      note(fmt::format(
          "metrics.jsonl: {} damaged and left out: {}{}.",
          metrics.damaged_lines == 1 ? "1 line is" : with_commas(metrics.damaged_lines) + " lines are",
          join(metrics.damage, ", "), metrics.damaged_lines > std::ssize(metrics.damage) ? ", ..." : ""));
    }
    if (metrics.ends_inside_a_line)
      note("metrics.jsonl ends inside a line: it is being written, or its writer was killed.");
    if (metrics.made_again > 0) {
      note(fmt::format("metrics.jsonl has {} that were repeated later; the later record counts.",
                       metrics.made_again == 1 ? "1 step" : with_commas(metrics.made_again) + " steps"));
    }
  }

  void take_summary() {
    const std::string text = text_of("summary.json");
    if (text.empty() && !has("summary.json")) return;
    const Json json = Json::parse(text, nullptr, false);
    if (json.is_object()) {
      record_.summary = read_summary(json);
    } else {
      note("summary.json is damaged: it has no JSON object.");
    }
  }

  /// Files <before>N<behind> in the order of N.
  void take_numbered(std::string_view before, std::string_view behind, std::vector<NamedText>& texts) {
    for (int64_t number = 1; number <= std::ssize(record_.attempts); ++number) {
      const std::string name = fmt::format("{}{}{}", before, number, behind);
      if (!has(name)) continue;
      std::string text = text_of(name);
      if (text.size() > kLargestText) text.resize(kLargestText);
      texts.push_back({name, std::move(text)});
    }
  }

  /// Takes the ends of logs of a run that failed: of rank 0, which speaks, and of the rank that failed.
  void take_log_ends() {
    const Attempt& last = record_.last_attempt();
    if (last.exit_code == 0) return;
    for (const int64_t rank : std::set<int64_t>{0, last.rank.value_or(0)}) {
      const std::string name = fmt::format("logs/rank-{}.log", rank);
      std::string text = end_of_file(name);
      if (!text.empty()) record_.log_ends.push_back({name, std::move(text)});
    }
  }

  /// The message of the last line "12:34:56 error: ..." of the rank that failed.
  std::string error_in_logs() const {
    const std::string name = fmt::format("logs/rank-{}.log", record_.last_attempt().rank.value_or(0));
    const auto log = std::ranges::find(record_.log_ends, name, &NamedText::name);
    if (log == record_.log_ends.end()) return {};
    constexpr std::string_view kMark = " error: ";
    constexpr size_t kTimeOfDay = 8;
    std::string found;
    for (const std::string& line : split(log->text, '\n')) {
      if (line.size() > kTimeOfDay && line.compare(kTimeOfDay, kMark.size(), kMark) == 0)
        found = line.substr(kTimeOfDay + kMark.size());
    }
    return found;
  }

  bool finds_checkpoints() const {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(run_.file("checkpoints"), ignored)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("step-") && name.find('.') == std::string::npos) return true;
    }
    return false;
  }

  std::string end_of_file(const std::string& name) const {
    std::ifstream file(run_.file(name), std::ios::binary | std::ios::ate);
    if (!file) return {};
    const std::streamoff size = file.tellg(), begin = std::max<std::streamoff>(0, size - kLogEndBytes);
    file.seekg(begin);
    std::string text(static_cast<size_t>(size - begin), '\0');
    file.read(text.data(), std::ssize(text));
    text.resize(static_cast<size_t>(file.gcount()));
    size_t first = text.size();
    for (size_t lines = 0; lines <= kLogEndLines && first != 0 && first != std::string::npos; ++lines)
      first = text.rfind('\n', first - 1);
    if (first != std::string::npos) text.erase(0, first + 1);
    return text;
  }

  void take_pictures() {
    take_picture("traces/pipeline.svg");
    std::error_code ignored;
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(run_.file("pictures"), ignored))
      names.insert("pictures/" + entry.path().filename().string());
    names.erase("pictures/curves.svg");  // drawn from the metrics, with what they have by now
    for (const std::string& name : names) take_picture(name);
  }

  void take_picture(const std::string& name) {
    const bool svg = name.ends_with(".svg");
    const std::string path = run_.file(name);
    std::error_code error;
    if ((!svg && !name.ends_with(".png")) || !fs::is_regular_file(path, error)) return;
    const uintmax_t size = fs::file_size(path, error);
    if (error) return;
    if (size > kLargestPicture || picture_bytes_ + size > kAllPictures) {
      note(fmt::format("{} is too large for the page: {}, after {} of other pictures.", name,
                       format_bytes(static_cast<double>(size)),
                       format_bytes(static_cast<double>(picture_bytes_))));
      return;
    }
    picture_bytes_ += size;
    std::string content = text_of(name);
    if (!svg && !content.starts_with("\x89PNG\r\n\x1a\n")) return note(name + " is not a PNG.");
    if (svg && content.find("<svg") == std::string::npos) return note(name + " is not an SVG.");
    record_.pictures.push_back({.name = name, .svg = svg, .content = std::move(content)});
  }

  const RunDirectory& run_;
  RunRecord record_;
  uintmax_t picture_bytes_ = 0;  ///< that the page has so far
};

}  // namespace

std::string RunRecord::config_value(const std::string& key) const {
  const auto found = std::ranges::find(config, key, &ConfigEntry::key);
  return found == config.end() ? "" : found->value;
}

std::string counted_in(const RunRecord& run) {
  const bool images = run.config_value("data.kind") == "images" || !run.metrics.curve("val_top1").empty();
  return images ? "images" : "tokens";
}

bool count_the_same(const std::vector<RunRecord>& runs) {
  return std::ranges::all_of(
      runs, [&](const RunRecord& run) { return counted_in(run) == counted_in(runs.front()); });
}

std::string counted_in(const std::vector<RunRecord>& runs) {
  const bool all =
      std::ranges::all_of(runs, [](const RunRecord& run) { return counted_in(run) == "images"; });
  return all ? "images" : "tokens";
}

RunRecord read_run(const std::string& path) {
  return RunReader(RunDirectory::open(path)).read();
}

}  // namespace trireme::report
