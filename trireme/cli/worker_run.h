#pragma once
// A training run on one rank of it: where its records go, what ends it early, and its steps.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/base/sink.h"
#include "trireme/cli/request.h"
#include "trireme/comm/world.h"
#include "trireme/plan/world.h"
#include "trireme/report/run_dir.h"
#include "trireme/train/trainer.h"

namespace trireme::cli {

/// Takes what a run prints, in place of stdout.
using LinesOut = std::function<void(const std::string&)>;

/// From the construction on SIGINT, SIGTERM, SIGUSR1 and SIGHUP end the run with its weights written
/// (train::TrainOptions::stop_signal); another one, a second or more later, ends the process at once. All
/// members are collective over the ranks. A process has one at a time.
class RankRun {
 public:
  /// Meets the ranks of `spec` and builds the run. Throws as train::Run, and EnvironmentError where rank 0
  /// cannot write its records. `program` brings data, metrics and callbacks of its own; null: nothing.
  RankRun(const Request& request, const Environment& environment, const plan::WorldSpec& spec,
          const LinesOut& lines = {}, const train::Program* program = nullptr);
  RankRun(const RankRun&) = delete;
  RankRun& operator=(const RankRun&) = delete;

  bool is_over() const { return run_->is_over(); }
  void step(int64_t count) { run_->step(count); }
  /// Once, when it is over. Returns the exit code of the run.
  int finish();

 private:
  void open_records(const Environment& environment, const LinesOut& lines);

  Request request_;
  std::shared_ptr<comm::World> world_;
  train::TrainOptions options_;
  std::optional<report::RunDirectory> directory_;  ///< of rank 0, as what follows
  report::Continuation next_;
  bool output_lost_ = false;
  std::vector<std::unique_ptr<Sink>> sinks_;
  std::unique_ptr<train::Run> run_;
};

/// Signals end the process at once again, as before its first run.
void no_run_under_way();

/// Ends the run under way after its next step, as that signal would.
void ask_to_stop(int signal);

/// Our launcher kills ranks that it takes for hung.
void beat_for_launcher(const Environment& environment, int64_t rank);

}  // namespace trireme::cli
