// pictures/curves.svg, once a run is over.
#include <filesystem>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/report/run_charts.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

/// Reading more takes longer than a run should wait for a picture of itself.
constexpr uintmax_t kMostMetrics = 256 << 20;

class CurvesSink final : public Sink {
 public:
  CurvesSink(RunDirectory run, std::string name) : run_(std::move(run)), name_(std::move(name)) {}

  void record(const StepRecord&) override {}

  /// A full disk costs the picture, not the run.
  void finish(const RunSummary&) override {
    try {
      write();
    } catch (const EnvironmentError& error) {
      log_warning("the picture of the curves was not written: {}", error.what());
    }
  }

 private:
  void write() const {
    const std::string metrics = run_.file("metrics.jsonl");
    std::error_code error;
    const uintmax_t size = std::filesystem::file_size(metrics, error);
    if (error) return;
    if (size > kMostMetrics) {
      log_info("no picture of the curves is drawn from {} of metrics; use trireme report",
               format_bytes(static_cast<double>(size)));
      return;
    }
    RunRecord record;
    record.name = name_;
    record.config = read_config_entries(read_file(run_.file("config.yaml")));
    record.attempts = run_.attempts();
    record.metrics = read_metrics(metrics);
    const std::string curves = draw_training_curves(record);
    if (curves.empty()) return;
    make_directories(run_.file("pictures"));
    write_file_atomic(run_.file("pictures/curves.svg"), curves);
  }

  RunDirectory run_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Sink> make_curves_sink(const RunDirectory& run, std::string name) {
  return std::make_unique<CurvesSink>(run, std::move(name));
}

}  // namespace trireme::report
