#pragma once
// Adapters (plan/adapter.h) as they leave a run: the weights that they make of the frozen
// ones, and files as PEFT has them.
#include <string>

#include "trireme/parallel/data_parallel.h"
#include "trireme/parallel/state_file.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"

namespace trireme::train {

/// Rank 0 writes the weights of the model without adapters that computes the same: W + alpha / rank B A, in
/// fp32, of each adapted layer. Collective; throws EnvironmentError on every rank when it cannot.
void save_merged(parallel::DataParallel& engine, const plan::ModelConfig& model,
                 const plan::ModelFacts& facts, const std::string& path, const parallel::Notes& notes = {});

/// Rank 0 writes the adapters alone into a folder as PEFT has them (adapter_model.safetensors in fp32,
/// adapter_config.json), which peft.PeftModel.from_pretrained() loads. `base`, which says what they stand on,
/// is noted there (load_adapter()). Collective; throws as save_merged().
void save_adapter(parallel::DataParallel& engine, const plan::ModelConfig& model,
                  const plan::ModelFacts& facts, const std::string& folder, const std::string& base = "");

/// Adapters take the values of such a folder, which must have all of them and no others. Collective. Throws,
/// on every rank, DataError when it has not, and ConfigError where it notes another `base` of the same dtype.
/// PEFT's own files note none.
void load_adapter(parallel::DataParallel& engine, const std::string& folder, const std::string& base);

}  // namespace trireme::train
