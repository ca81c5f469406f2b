#pragma once
// The client of `trireme train --controller`: workers build the run and make its steps when it says so.
#include "trireme/base/env.h"
#include "trireme/cli/request.h"
#include "trireme/controller/address.h"
#include "trireme/launch/local.h"
#include "trireme/plan/config.h"

namespace trireme::cli {

/// Starts `job.ranks` workers, with a server of their own in this process, and drives them through the run of
/// `request`. Signals reach the workers as they reach ranks. Throws as launch::Launcher::run() does, and as a
/// dispatcher that cannot listen.
launch::JobEnd run_with_own_workers(launch::Launcher& launcher, launch::LocalJob job, const Request& request,
                                    plan::Device device, const Environment& environment);

/// Drives the workers of the server at `address`, which print nothing: their lines come here. A signal ends
/// the run as it does that of ranks; another one, a second or more later, leaves it. Throws CommError where
/// the server cannot be had; a worker that fails ends the run with its exit code, which is logged.
launch::JobEnd run_on_server(const controller::Address& address, const Request& request,
                             const Environment& environment);

/// The workers of the server, all of which must be there.
struct ServerWorkers {
  int64_t count = 0;
  bool on_gpus = false;
};
/// Throws CommError where there is no server, or workers are missing.
ServerWorkers workers_of_server(const controller::Address& address, const Environment& environment);

}  // namespace trireme::cli
