// metrics.jsonl grows by one line a step; summary.json appears whole at the end.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/report/recorded_number.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

/// Leaves the lines of steps up to `step`, in rising order. What a process could not finish goes without a
/// word; any other line that is none of ours is left out with a warning. Returns the last step that is left,
/// 0 for none.
int64_t drop_steps_after(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) return 0;
  const std::string text = read_file(path);
  std::string kept;
  std::vector<std::string> foreign;  // their numbers
  int64_t last = 0, number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    const std::string_view line = std::string_view(text).substr(begin, end + 1 - begin);
    const std::optional<int64_t> found = step_of_line(line);
    ++number;
    if (!found || (*found <= last && *found <= step)) {
      foreign.push_back(std::to_string(number));
    } else if (*found <= step) {
      last = *found;
      kept += line;
    }
    begin = end + 1;
  }
  if (!foreign.empty()) {
    constexpr size_t kShown = 5;
    const bool all = foreign.size() <= kShown;
    const size_t count = foreign.size();
    foreign.resize(std::min(count, kShown));
    log_warning("{} {} of {} {} not a record of a step in its turn, and {} left out{}",
                all && count == 1 ? "line" : "lines", join(foreign, ", "), path, count == 1 ? "is" : "are",
                count == 1 ? "is" : "are", all ? "" : fmt::format("; there are {} of them", count));
  }
  if (kept == text) return last;
  if (!text.starts_with(kept)) {
    write_file_atomic(path, kept);
  } else if (::truncate(path.c_str(), static_cast<off_t>(kept.size())) != 0) {
    throw EnvironmentError("[report.run_files] cannot truncate {}: {}; check its permissions", path,
                           errno_text(errno));
  }
  return last;
}

class RunFilesSink final : public Sink {
 public:
  RunFilesSink(RunDirectory run, Continuation next)
      : run_(std::move(run)),
        next_(std::move(next)),
        metrics_path_(run_.file("metrics.jsonl")),
        summary_path_(run_.file("summary.json")) {}

  /// Called once the checkpoint has accepted the state: a refused one leaves the run as it is.
  bool resume(int64_t step) override {
    const bool begun = begin_attempt();
    const Manifest& manifest = next_.manifest;
    if (!manifest.config_yaml.empty()) run_.replace_config(manifest.config_yaml, manifest.files);
    if (begun) note_resumed(step);
    metrics_.reset();  // the file may be replaced
    return drop_steps_after(metrics_path_, step) == step;
  }
  void record(const StepRecord& step) override {
    if (!metrics_) metrics_.emplace(metrics_path_);
    metrics_->append(to_json_line(step));
  }

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
  std::optional<LineFile> metrics_;  ///< opened for the first record: a run that is refused has none
  std::string summary_path_;
};

}  // namespace

std::unique_ptr<Sink> make_run_files_sink(const RunDirectory& run, Continuation next) {
  return std::make_unique<RunFilesSink>(run, std::move(next));
}

}  // namespace trireme::report
