// metrics.jsonl grows by one line a step; summary.json appears whole at the end.
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

/// Cuts off the lines of later steps, and one that a process could not finish.
void drop_steps_after(const std::string& path, int64_t step) {
  const std::string text = read_file(path);
  size_t kept = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    const auto line = nlohmann::json::parse(text.substr(begin, end - begin), nullptr, false);
    if (!line.is_object() || line.value("step", step + 1) > step) break;
    kept = begin = end + 1;
  }
  if (kept == text.size()) return;
  if (::truncate(path.c_str(), static_cast<off_t>(kept)) != 0)
    throw EnvironmentError("[report.run_files] cannot cut {}: {}; check its permissions", path,
                           errno_text(errno));
}

class RunFilesSink final : public Sink {
 public:
  explicit RunFilesSink(const RunDirectory& run)
      : metrics_path_(run.file("metrics.jsonl")),
        metrics_(metrics_path_),
        summary_path_(run.file("summary.json")) {}

  void resume(int64_t step) override { drop_steps_after(metrics_path_, step); }
  void record(const StepRecord& step) override { metrics_.append(to_json_line(step)); }

  void finish(const RunSummary& summary) override {
    write_file_atomic(summary_path_, to_json_line(summary) + "\n");
  }

 private:
  std::string metrics_path_;
  LineFile metrics_;
  std::string summary_path_;
};

}  // namespace

std::unique_ptr<Sink> make_run_files_sink(const RunDirectory& run) {
  return std::make_unique<RunFilesSink>(run);
}

}  // namespace trireme::report
