// metrics.jsonl grows by one line a step; summary.json appears whole at the end.
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

class RunFilesSink final : public Sink {
 public:
  explicit RunFilesSink(const RunDirectory& run)
      : metrics_(run.file("metrics.jsonl")), summary_path_(run.file("summary.json")) {}

  void record(const StepRecord& step) override { metrics_.append(to_json_line(step)); }

  void finish(const RunSummary& summary) override {
    write_file_atomic(summary_path_, to_json_line(summary) + "\n");
  }

 private:
  LineFile metrics_;
  std::string summary_path_;
};

}  // namespace

std::unique_ptr<Sink> make_run_files_sink(const RunDirectory& run) {
  return std::make_unique<RunFilesSink>(run);
}

}  // namespace trireme::report
