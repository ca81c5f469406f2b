#include <fmt/format.h>
#include <unistd.h>

#include "trireme/base/cores.h"
#include "trireme/base/log.h"
#include "trireme/cli/worker_host.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/world.h"
#include "trireme/controller/worker_program.h"

namespace trireme::cli {

int worker_controller(const Request& request, const Environment& environment) {
  const ControllerOptions& options = request.controller;
  // Workers that a server has started have its numbers; others have a terminal and their GPUs for themselves.
  const bool is_started = environment.get("TRIREME_LAUNCHER").has_value();
  const plan::WorldSpec place =
      is_started ? plan::detect_world(environment) : plan::WorldSpec{.launcher = "none"};
  if (is_started) beat_for_launcher(environment, place.rank);
  const auto wanted = plan::parse<plan::Device>(options.device);
  if (!wanted) throw ConfigError("[cli.worker] --device is '{}'; use cpu, cuda or auto", options.device);
  const c10::Device device = comm::take_device(*wanted, place);
  controller::WorkerSettings settings{.address = controller::parse_address(options.address),
                                      .wanted_number = is_started ? place.rank : options.number,
                                      .devices = device.str(),
                                      .timeout_s = options.timeout_s};
  settings.cores = usable_cores();
  settings.lost = [](const std::string& why) {
    // The working thread may be waiting for the peer that is gone, and nothing here is worth keeping.
    log_error("[controller.worker] {}", why);
    ::_exit(static_cast<int>(ExitCode::kCommunication));
  };
  WorkerHost host(environment, !options.prints);
  controller::run_worker(std::move(settings), device, options.timeout_s, environment, host);
  // Who has started workers for one run gets its code from them.
  return options.prints ? host.last_exit_code() : 0;
}

}  // namespace trireme::cli
