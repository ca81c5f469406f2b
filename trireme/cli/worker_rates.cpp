// trireme doctor --probe: rates of this machine, into a file.
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/bench/machine_rates.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/world.h"
#include "trireme/plan/rates.h"

namespace trireme::cli {

int worker_rates(const Request& request, const Environment& environment) {
  const plan::WorldSpec spec = plan::detect_world(environment);
  const auto device = plan::parse<plan::Device>(request.rates.device);
  TRIREME_CHECK(device, "[cli.doctor] the request has no valid device: '{}'", request.rates.device);
  constexpr double kTimeout_s = 120.0;
  const auto world = comm::World::join(spec, comm::take_device(*device, spec), kTimeout_s);
  plan::Rates rates = bench::measure_rates(world);
  if (world->rank() != 0) return 0;
  rates.disk = bench::measure_disk(request.rates.file);
  write_file_atomic(request.rates.file, plan::to_json(rates));
  return 0;
}

}  // namespace trireme::cli
