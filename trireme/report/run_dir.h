#pragma once
// The run directory: everything a run leaves behind, and the only thing reports read.
// <root>/<name>-<time>-<id>/ { manifest.json config.yaml metrics.jsonl summary.json logs/ tensorboard/
// checkpoints/ }
#include <cstdint>
#include <memory>
#include <string>

#include "trireme/base/file.h"
#include "trireme/base/sink.h"

namespace trireme::report {

struct Manifest {
  std::string command;      ///< as typed
  std::string config_yaml;  ///< resolved; goes to config.yaml
  std::string device;       ///< "cpu" or "cuda"
  std::string mesh;         ///< "dp_shard=2"
  int64_t ranks = 1;
};

class RunDirectory {
 public:
  /// Makes the folder (unique even for two runs in one second), config.yaml and manifest.json (with version,
  /// machine, start time, exit_code null), and points <root>/latest at it. Throws EnvironmentError.
  static RunDirectory create(const std::string& root, const std::string& name, const Manifest& manifest);
  /// Opens an existing one. Throws DataError when `path` is not a run directory.
  static RunDirectory open(const std::string& path);

  const std::string& path() const { return path_; }
  std::string file(const std::string& relative) const { return path_ + "/" + relative; }

  /// Completes manifest.json with the end time and the exit code.
  void finish(int exit_code) const;

 private:
  explicit RunDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

/// metrics.jsonl and summary.json.
std::unique_ptr<Sink> make_run_files_sink(const RunDirectory& run);

/// tensorboard/events.out.tfevents.*: scalars loss, val_loss, grad_norm, lr, tokens_per_s, step_ms,
/// steps_per_s, peak_bytes, and active_bytes and reserved_bytes of GPUs.
std::unique_ptr<Sink> make_tensorboard_sink(const RunDirectory& run);

/// One StepRecord as one line of JSON (non-finite numbers as strings), and the summary object.
std::string to_json_line(const StepRecord& record);
std::string to_json_line(const RunSummary& summary);

}  // namespace trireme::report
