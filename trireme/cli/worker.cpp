// trireme-worker: one rank. Started by the front command, by a launcher, or alone; takes its orders from the
// variable TRIREME_REQUEST.
#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/cli/worker_main.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/launch/fork_server.h"

namespace {

using namespace trireme;

int run(const Environment& environment) {
  const auto text = environment.get("TRIREME_REQUEST");
  if (!text) {
    throw ConfigError(
        "[cli.worker] TRIREME_REQUEST is not set; trireme-worker is started by the command 'trireme'");
  }
  const cli::Request request = cli::request_from_json(*text);
  if (request.verb == "train") return cli::worker_train(request, environment);
  if (request.verb == "generate") return cli::worker_generate(request);
  if (request.verb == "eval") return cli::worker_eval(request, environment);
  if (request.verb == "data") return cli::worker_data(request);
  if (request.verb == "bench_comm") return worker_bench_comm(request, environment);
  if (request.verb == "bench_pipeline") return worker_bench_pipeline(request, environment);
  if (request.verb == "toy_pipeline") return worker_toy_pipeline(request, environment);
  if (request.verb == "controller") return cli::worker_controller(request, environment);
  if (request.verb == "replay") return cli::worker_replay(request, environment);
  if (request.verb == "probe") return cli::worker_probe();
  if (request.verb == "rates") return cli::worker_rates(request, environment);
  throw LogicError("[cli.worker] verb '{}' is unknown", request.verb);
}

}  // namespace

int main() {
  launch::serve_forks();
  cli::run_worker([] { return run(Environment::process()); });
}
