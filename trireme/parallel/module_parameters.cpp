#include "trireme/parallel/module_parameters.h"

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
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

/// The tensors of one storage that a module registers, and those that these keep themselves: a view such as
/// torch::randn({2, 3}).t() keeps the tensor that it was made of, for autograd.
class Holders {
 public:
  void add_registered(const at::Tensor& tensor) {
    registered_.insert(tensor.unsafeGetTensorImpl());
    add(tensor);
  }
  /// Whether nobody else has the storage, or a handle of a tensor that was kept.
  bool are_all(const c10::Storage& memory) const {
    if (memory.use_count() > known_.size()) return false;
    return std::ranges::all_of(kept_, [this](const auto& kept) {
      return registered_.contains(kept.first) ||
             c10::raw::intrusive_ptr::use_count(kept.first) <= kept.second;
    });
  }

 private:
  void add(const at::Tensor& tensor) {
    if (!known_.insert(tensor.unsafeGetTensorImpl()).second) return;
    const auto* const view = torch::autograd::impl::get_view_autograd_meta(tensor);
    if (view == nullptr) return;
    if (view->has_bw_view()) keep(tensor, view->get_backward_view().base_);
    if (view->has_fw_view() && !view->shared_view_info()) keep(tensor, view->get_forward_view().base_);
  }
  void keep(const at::Tensor& view, const at::Tensor& base) {
    if (!base.has_storage() || base.storage().unsafeGetStorageImpl() != view.storage().unsafeGetStorageImpl())
      return;
    ++kept_[base.unsafeGetTensorImpl()];
    add(base);
  }

  std::unordered_set<c10::TensorImpl*> known_, registered_;
  std::unordered_map<c10::TensorImpl*, size_t> kept_;  ///< and by how many views
};

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

void check_no_other_holder(const torch::nn::Module& module, const char* operation) {
  std::unordered_map<const c10::StorageImpl*, Holders> by_memory;
  const auto note = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage())
      by_memory[tensor.storage().unsafeGetStorageImpl()].add_registered(tensor);
  };
  const auto params = module_parameters(module);
  for (const ModuleParameter& param : params) note(param.tensor);
  for (const auto& entry : module.named_buffers()) note(entry.value());
  for (const auto& [name, aliases, tensor] : params) {
    if (tensor.numel() == 0 ||
        by_memory.at(tensor.storage().unsafeGetStorageImpl()).are_all(tensor.storage()))
      continue;
    throw LogicError(
        "[{}] another tensor has the memory of parameter {} of {}, such as weight.t() that a constructor "
        "kept "
        "as a plain member, a detached copy, or what the graph of an earlier pass keeps. The engine moves "
        "the "
        "parameter to other memory, so that tensor would stay as it is. Make it in forward(), or clone() it; "
        "drop outputs and losses of earlier passes",
        operation, name, module.name());
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
