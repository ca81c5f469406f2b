#include "trireme/parallel/module_parameters.h"

#include <ATen/MemoryOverlap.h>
#include <torch/nn/module.h>

#include <map>
#include <unordered_map>
#include <unordered_set>

#include "trireme/base/error.h"
#include "trireme/plan/flat_layout.h"

namespace trireme::parallel {
namespace {

void refuse_shared_memory(const std::string& first, const std::string& second,
                          const torch::nn::Module& module) {
  throw LogicError(
      "[parallel.module_parameters] {} and {} of {} are different tensors that share memory, such as a view "
      "or a detached copy of a parameter; register the same tensor under both names to share it, or clone it",
      first, second, module.name());
}

/// From the first to behind the last byte of the storage that belongs to a strided tensor with elements.
plan::Range bytes_of(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto size = static_cast<int64_t>(tensor.element_size());
  return {tensor.storage_offset() * size, (last + 1) * size};
}

struct Occupied {
  std::string name;
  int64_t end;
};

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
  std::map<const c10::StorageImpl*, std::map<int64_t, Occupied>> by_memory;  // by first byte
  const auto occupy = [&](const std::string& name, const at::Tensor& tensor) {
    const plan::Range bytes = bytes_of(tensor);
    auto& there = by_memory[tensor.storage().unsafeGetStorageImpl()];
    auto next = there.upper_bound(bytes.begin);
    if (next != there.end() && next->first < bytes.end) refuse_shared_memory(next->second.name, name, module);
    if (next != there.begin() && (--next)->second.end > bytes.begin)
      refuse_shared_memory(next->second.name, name, module);
    there.emplace(bytes.begin, Occupied{name, bytes.end});
  };
  for (const auto& [name, aliases, tensor] : module_parameters(module)) {
    if (tensor.numel() > 0) occupy(name, tensor);
  }
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& entry : module.named_buffers()) {
    const at::Tensor& buffer = entry.value();
    const bool has_memory = buffer.defined() && buffer.has_storage() && buffer.numel() > 0;
    if (has_memory && by_memory.contains(buffer.storage().unsafeGetStorageImpl()) &&
        seen.insert(buffer.unsafeGetTensorImpl()).second)
      occupy(entry.key(), buffer);
  }
}

void check_writable(const std::string& name, const at::Tensor& tensor, const char* operation) {
  if (at::has_internal_overlap(tensor) != at::MemOverlap::Yes) return;
  throw LogicError(
      "[{}] several elements of {} [{}] share one place in memory, as expand() makes it, so nothing can be "
      "written to it; register its clone() in the module",
      operation, name, fmt::join(tensor.sizes(), ", "));
}

}  // namespace trireme::parallel
