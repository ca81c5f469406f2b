#pragma once
// Weights with adapters added to them, while both are read from their files.
#include <memory>
#include <string>

#include "trireme/checkpoint/source.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"

namespace trireme::checkpoint {

/// Adapters as files have them.
struct AdapterTensors {
  std::unique_ptr<Source> source;
  std::string prefix = {};  ///< before the names of parameters
  /// Magnitudes of DoRA are what is added to the lengths of rows (plan/adapter.h), else these lengths.
  bool lengths_are_changes = false;
};

/// The parameters of `model` without its adapters, in fp32: `base` with them added (low_rank.h). A layer is
/// held at a time. Both sources must have been checked (check_fit()). Reading throws DataError where a sum is
/// not finite.
std::unique_ptr<Source> merge_adapters(std::unique_ptr<Source> base, AdapterTensors adapters,
                                       const plan::ModelConfig& model);

/// The digest of a model's frozen parameters in the safetensors dtype `dtype`, as runs note it of what
/// their adapters stand on: XXH3-64 of their values in the order of the units.
std::string digest_of_frozen(const Source& base, const plan::ModelFacts& facts, const std::string& dtype);

}  // namespace trireme::checkpoint
