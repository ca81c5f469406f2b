#pragma once
// What a run reads, made ready before the first step: by one rank of a host, while the others wait.
#include <memory>

#include "trireme/comm/mesh.h"
#include "trireme/train/run_data.h"
#include "trireme/train/trainer.h"

namespace trireme::train {

/// Prepares the data of a run and opens it. May take any time as long as some rank makes headway; the world's
/// timeout limits the time without headway. Rank 0 logs how far it has come. Collective. Throws what
/// open_run_data() throws on ranks that failed, comm::FailedElsewhere on the others; Stopped when a rank
/// has been sent a signal; EnvironmentError when nothing moves; DataError on every rank when they read
/// different data, ConfigError when the model cannot read it. A preparation that is not completed leaves
/// nothing in the cache.
std::shared_ptr<const RunData> prepare_data(const TrainOptions& run, const comm::Mesh& mesh);

}  // namespace trireme::train
