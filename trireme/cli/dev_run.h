#pragma once
// train.fast_dev_run: a few steps of everything that a real run does, to see whether the whole way works.
#include <optional>
#include <string>
#include <vector>

#include "trireme/cli/train_job.h"

namespace trireme::cli {

struct DevRun {
  TrainJob job;                        ///< with the keys that make it short, in a folder of its own
  std::vector<std::string> shortened;  ///< "train.steps=3 instead of 2000"
};

/// The job as it becomes where its config asks for train.fast_dev_run; none: it does not, or the job goes on
/// with a run (refuse_dev_run()).
std::optional<DevRun> dev_run_of(const TrainJob& job, const Front& front);

/// Trains, validates, saves at every step and samples; then goes on from the last save but one, and compares
/// the weights at the end. Says what it has shortened, and where the run lies: neither 'latest' nor --resume
/// looks there. Throws as run_train_job(), ComparisonError when a run that goes on ends with other weights.
FinishedJob run_dev_run(const DevRun& dev, Front& front);

}  // namespace trireme::cli
