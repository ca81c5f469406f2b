#pragma once
// The attempts at a training run: when ranks die, all are started again from the newest checkpoint.
#include <cstdint>
#include <functional>

#include "trireme/base/env.h"
#include "trireme/cli/request.h"
#include "trireme/launch/local.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {

struct RestartOptions {
  int64_t most = 0;  ///< in a row without a checkpoint that is further than all before; 0: none
  double first_delay_s =
      1.0;  ///< before the first of them; each further one waits twice as long, at most 60 s
};

/// Runs the ranks of one attempt to their end; `request` is in the environment of `job` already.
using RunRanks =
    std::function<launch::JobEnd(launch::Launcher&, const launch::LocalJob& job, const Request& request)>;

/// Runs `job` in `directory`, of which this process has the lock, to its end, again after failures that
/// launch::may_start_again() knows, and leaves in the manifest how each attempt ended. The first is
/// `next.attempt`; where ranks refuse to go on, the run stays as it was. `request` is what ranks are told
/// beside `environment`; later attempts are told to resume. Returns the exit code of the last attempt; that
/// of a signal where one came between two; kEnvironment where all went well but lines on stdout were lost.
/// Throws EnvironmentError when ranks cannot be started.
int run_attempts(launch::LocalJob job, Request request, const Environment& environment,
                 const report::RunDirectory& directory, const report::Continuation& next,
                 const RestartOptions& options, const RunRanks& run_ranks);

}  // namespace trireme::cli
