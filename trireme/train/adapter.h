#pragma once
// Adapters (plan/adapter.h) as they leave a run: the weights that they make of the frozen
// ones, and files as PEFT has them.
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"
#include "trireme/state/state_file.h"

namespace trireme::train {

/// A model with adapters, some of which each rank has. All ranks call the functions together. Values are
/// whole, in fp32 on the CPU, on rank 0 at least, and may be undefined on others.
struct AdaptedModel {
  const plan::ModelConfig& config;
  const plan::ModelFacts& facts;
  using Body = std::function<void(const std::string& name, const at::Tensor& values)>;
  /// Calls its argument for each parameter that is frozen, or each that is trained, on all ranks.
  std::function<void(const Body&)> visit_frozen, visit_trained;
  /// One that is trained.
  std::function<at::Tensor(const std::string& name)> trained;
};

/// Rank 0 writes the weights of the model without adapters that computes the same, in fp32: of each adapted
/// layer W + alpha / rank B A, with rows of the lengths of DoRA. Collective; throws EnvironmentError on every
/// rank when it cannot.
void save_merged(comm::Group& all, const AdaptedModel& model, const std::string& path,
                 const state::Notes& notes = {});

/// Rank 0 writes the adapters alone into a folder as PEFT has them (adapter_model.safetensors in fp32,
/// adapter_config.json), which peft.PeftModel.from_pretrained() loads. `base`, which says what they stand on,
/// is noted there (load_adapter()). Collective; throws as save_merged().
void save_adapter(comm::Group& all, const AdaptedModel& model, const std::string& folder,
                  const std::string& base = "");

/// Adapters of some engines, which have parts of the model that `model` and its `facts` describe, take the
/// values of such a folder. It must have those of the whole model and no others. Collective. Throws, on every
/// rank, DataError when it has not, and ConfigError where it notes another `base` of the same dtype. PEFT's
/// own files note none.
void load_adapter(comm::Group& all, const std::vector<std::shared_ptr<parallel::DataParallel>>& engines,
                  const plan::ModelConfig& model, const plan::ModelFacts& facts, const std::string& folder,
                  const std::string& base);

}  // namespace trireme::train
