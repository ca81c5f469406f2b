// metrics.jsonl grows by one line a step; summary.json appears whole at the end.
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

/// Cuts off the lines of later steps, and one that a process could not finish. Returns the last step that is
/// left, 0 for none.
int64_t drop_steps_after(const std::string& path, int64_t step) {
  const std::string text = read_file(path);
  size_t kept = 0;
  int64_t last = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    const auto line = nlohmann::json::parse(text.substr(begin, end - begin), nullptr, false);
    if (!line.is_object() || line.value("step", step + 1) > step) break;
    last = line["step"];
    kept = begin = end + 1;
  }
  if (kept != text.size() && ::truncate(path.c_str(), static_cast<off_t>(kept)) != 0)
    throw EnvironmentError("[report.run_files] cannot truncate {}: {}; check its permissions", path,
                           errno_text(errno));
  return last;
}

class RunFilesSink final : public Sink {
 public:
  RunFilesSink(RunDirectory run, Continuation next)
      : run_(std::move(run)),
        next_(std::move(next)),
        metrics_path_(run_.file("metrics.jsonl")),
        metrics_(metrics_path_),
        summary_path_(run_.file("summary.json")) {}

  /// What the checkpoint refuses never gets here: the run stays as it is.
  bool resume(int64_t step) override {
    const bool begun = begin_attempt();
    const Manifest& manifest = next_.manifest;
    if (!manifest.config_yaml.empty()) run_.replace_config(manifest.config_yaml, manifest.schedule);
    if (begun) note_resumed(step);
    return drop_steps_after(metrics_path_, step) == step;
  }
  void record(const StepRecord& step) override { metrics_.append(to_json_line(step)); }

  void finish(const RunSummary& summary) override {
    write_file_atomic(summary_path_, to_json_line(summary) + "\n");
  }

 private:
  /// A manifest that cannot be written, as on a full disk, is no reason to end a run.
  bool begin_attempt() const {
    if (next_.attempt == 0) return true;
    try {
      run_.begin_attempt(next_.attempt, next_.manifest);
      return true;
    } catch (const EnvironmentError& error) {
      log_warning("the manifest could not record that the run continues: {}", error.what());
      return false;
    }
  }

  void note_resumed(int64_t step) const {
    try {
      run_.note_resumed(step);
    } catch (const EnvironmentError& error) {
      log_warning("the manifest could not record that the run continued after step {}: {}", step,
                  error.what());
    }
  }

  RunDirectory run_;
  Continuation next_;
  std::string metrics_path_;
  LineFile metrics_;
  std::string summary_path_;
};

}  // namespace

std::unique_ptr<Sink> make_run_files_sink(const RunDirectory& run, Continuation next) {
  return std::make_unique<RunFilesSink>(run, std::move(next));
}

}  // namespace trireme::report
