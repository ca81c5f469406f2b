#pragma once
// The runs of `trireme train --controller` on a worker.
#include <optional>
#include <string>

#include "trireme/base/env.h"
#include "trireme/cli/run_action.h"
#include "trireme/cli/worker_run.h"
#include "trireme/controller/run_host.h"

namespace trireme::cli {

class WorkerHost : public controller::RunHost {
 public:
  /// `environment` must outlive this. `keeps_lines`: the client prints what the run prints; else this process
  /// does.
  WorkerHost(const Environment& environment, bool keeps_lines)
      : environment_(environment), keeps_lines_(keeps_lines) {}

  std::string act(const std::string& text, const plan::WorldSpec& meeting) override;
  /// A run that its client has left is ended as by SIGTERM, so that it can go on from a checkpoint.
  void end() override;

  /// The exit code of the last run that has come to its end.
  int last_exit_code() const { return last_exit_code_; }

 private:
  void build(const Request& request, const plan::WorldSpec& meeting);
  void step(const RunAction& action);
  void finish();
  RunAnswer answer();
  RankRun& run();

  const Environment& environment_;
  bool keeps_lines_;
  std::string lines_;
  std::optional<RankRun> run_;
  int last_exit_code_ = 0;
};

}  // namespace trireme::cli
