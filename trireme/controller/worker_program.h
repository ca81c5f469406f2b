#pragma once
// The work of a controller's worker: runs the programs of clients, one after the other, until the dispatcher
// says that it is over.
#include <c10/core/Device.h>

#include "trireme/base/env.h"
#include "trireme/controller/run_host.h"
#include "trireme/controller/worker_link.h"

namespace trireme::controller {

/// Joins the dispatcher, meets the other workers, and runs programs, and runs by `host`. Returns when it is
/// told to end. Throws what joining throws; an instruction or an action that fails ends the worker: the
/// client is told which and why, and the error thrown.
void run_worker(WorkerSettings settings, c10::Device device, double timeout_s, const Environment& environment,
                RunHost& host);

}  // namespace trireme::controller
