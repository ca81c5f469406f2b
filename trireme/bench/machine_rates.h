#pragma once
// The rates of this machine, measured by all of its ranks at once, since they share memory, power and cores.
#include <memory>
#include <string>

#include "trireme/comm/world.h"
#include "trireme/plan/rates.h"

namespace trireme::bench {

/// Products, attention, passes over memory and collectives; the disk's are left as they are. Says on stderr
/// what it is at. Collective; every rank has rates of its own, of which rank 0's are meant.
plan::Rates measure_rates(const std::shared_ptr<comm::World>& world);

/// The rates at which a file beside `path` is written and read, past the cache of the host. Throws
/// EnvironmentError when it cannot be written.
plan::DiskRates measure_disk(const std::string& path);

}  // namespace trireme::bench
