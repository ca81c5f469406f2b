#include "trireme/parallel/module_parameters.h"

#include <torch/nn/module.h>

#include <unordered_map>

#include "trireme/base/error.h"

namespace trireme::parallel {
namespace {

void refuse_shared_memory(const std::string& first, const std::string& second,
                          const torch::nn::Module& module) {
  throw LogicError(
      "[parallel.module_parameters] {} and {} of {} are different tensors in one memory, such as a view or a "
      "detached copy of a parameter; register the same tensor under both names to share it, or clone it",
      first, second, module.name());
}

}  // namespace

std::vector<ModuleParameter> module_parameters(const torch::nn::Module& module) {
  std::vector<ModuleParameter> params;
  std::unordered_map<const c10::TensorImpl*, size_t> by_tensor;
  for (const auto& entry : module.named_parameters()) {
    const at::Tensor& tensor = entry.value();
    const auto [known, is_new] = by_tensor.emplace(tensor.unsafeGetTensorImpl(), params.size());
    if (!is_new) {
      params[known->second].aliases.push_back(entry.key());
      continue;
    }
    params.push_back({entry.key(), {}, tensor});
  }
  return params;
}

void check_separate_memory(const torch::nn::Module& module) {
  std::unordered_map<const c10::StorageImpl*, std::string> by_memory;
  for (const auto& [name, aliases, tensor] : module_parameters(module)) {
    const auto [owner, alone] = by_memory.emplace(tensor.storage().unsafeGetStorageImpl(), name);
    if (!alone) refuse_shared_memory(owner->second, name, module);
  }
  for (const auto& entry : module.named_buffers()) {
    const at::Tensor& buffer = entry.value();
    if (!buffer.defined() || !buffer.has_storage()) continue;
    const auto owner = by_memory.find(buffer.storage().unsafeGetStorageImpl());
    if (owner != by_memory.end()) refuse_shared_memory(owner->second, entry.key(), module);
  }
}

}  // namespace trireme::parallel
