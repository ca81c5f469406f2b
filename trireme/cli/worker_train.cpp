#include "trireme/base/log.h"
#include "trireme/cli/worker_run.h"
#include "trireme/cli/worker_verbs.h"

namespace trireme::cli {

int worker_train(const Request& request, const Environment& environment, const train::Program* program) {
  const plan::WorldSpec spec = plan::detect_world(environment);
  if (spec.launcher == "trireme") beat_for_launcher(environment, spec.rank);
  if (spec.rank > 0) {
    if (spec.launcher != "trireme") set_log_prefix(fmt::format("[r{}] ", spec.rank));
  }
  RankRun run(request, environment, spec, {}, program);
  while (!run.is_over()) run.step(1);
  return run.finish();
}

}  // namespace trireme::cli
