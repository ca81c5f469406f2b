#pragma once
// Runs that a client drives: what a worker does with the actions of a run. The controller passes them on and
// knows nothing of what they say.
#include <string>

#include "trireme/plan/world.h"

namespace trireme::controller {

/// Called by the working thread of a worker, on all workers in one order.
class RunHost {
 public:
  virtual ~RunHost() = default;
  /// Carries out an action together with the other workers, which can be met at `meeting`. Returns what
  /// worker 0 answers, of at most kMostAnswer bytes; answers of others are not sent. What it throws ends the
  /// worker.
  virtual std::string act(const std::string& action, const plan::WorldSpec& meeting) = 0;
  /// The client has gone, whatever is under way.
  virtual void end() = 0;
};

}  // namespace trireme::controller
