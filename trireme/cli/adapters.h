#pragma once
// Adapters that a run has trained, or PEFT, and the weights that they belong to.
#include <string>

#include "trireme/checkpoint/merged_source.h"
#include "trireme/cli/front.h"
#include "trireme/plan/config.h"

namespace trireme::cli {

struct FoundAdapters {
  std::string path;     ///< a folder of PEFT, or a checkpoint
  plan::Config config;  ///< of the run that trained them, else of their base; has adapter.* and model.weights
  std::string digest;   ///< what they note of their base, "bf16 0123456789abcdef"; empty: nothing
  bool is_peft = false;

  /// Opened, and checked to be those of the config.
  checkpoint::AdapterTensors open() const;
};

/// The adapters that `word` names: a folder of PEFT, a checkpoint, or a run, of which those that its last
/// attempt left at its end count, else those of its newest checkpoint. `base`: the weights that they belong
/// to, as model.weights names them; empty: those that they were trained on. Throws ConfigError where there
/// are no adapters, where nothing says what they belong to, and where the two do not fit.
FoundAdapters find_adapters(const std::string& word, const std::string& base, const Front& front);

}  // namespace trireme::cli
