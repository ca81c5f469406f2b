#pragma once
// The weights of a finished run as one safetensors file with Hugging Face names.
#include <string>

#include "trireme/nn/language_model.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/model_facts.h"

namespace trireme::train {

/// Writes the fp32 masters to `path` on the rank where `writes` is true, one parameter at a time. Collective.
/// Throws EnvironmentError when the disk fails.
void save_weights(const parallel::DataParallel& engine, const plan::ModelFacts& facts,
                  const std::string& path, bool writes);

/// Copies the tensors of `path` into the parameters of the same names. Throws DataError when names or shapes
/// differ.
void load_weights(nn::LanguageModel& model, const std::string& path);

}  // namespace trireme::train
