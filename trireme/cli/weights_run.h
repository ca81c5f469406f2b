#pragma once
// Runs of no steps: weights that came from elsewhere, with the config of their model, so that every command
// that takes a run takes them.
#include <string>

#include "trireme/checkpoint/source.h"
#include "trireme/cli/front.h"
#include "trireme/plan/config.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {

struct WeightsRun {
  plan::Config config;  ///< of the run, but for model.weights, which will be its own
  std::string came_with =
      {};               ///< a folder of Hugging Face whose small files it keeps (kImported); empty: none
  bool speaks = false;  ///< data.tokenizer is the tokenizer of that folder
};

/// `name` where it can be the name of a run; throws ConfigError where it cannot.
std::string checked_name(const std::string& name);

/// Makes a run that is there with all the parameters of its model, read from `weights`, or not at all,
/// however this ends. Throws EnvironmentError where the disk fails.
report::RunDirectory make_weights_run(const WeightsRun& made, const checkpoint::Source& weights,
                                      const Front& front);

}  // namespace trireme::cli
