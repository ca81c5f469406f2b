#include "trireme/parallel/storage.h"

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::parallel {

bool has_storage(const at::Tensor& tensor) {
  return tensor.storage().nbytes() > 0;
}

void free_storage(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  storage->set_nbytes(0);
}

void allocate_storage(const at::Tensor& tensor) {
  if (has_storage(tensor) || tensor.numel() == 0) return;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  TRIREME_CHECK(storage->allocator() != nullptr,
                "[parallel.storage] a tensor of {} elements has no allocator", tensor.numel());
  const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
  storage->set_nbytes(bytes);
}

at::Tensor without_storage(int64_t count, const at::TensorOptions& options) {
  at::Tensor flat = at::empty({0}, options);
  flat.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  return flat;
}

at::Tensor place_in(const at::Tensor& flat, int64_t offset, at::IntArrayRef shape) {
  at::Tensor place =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(flat.storage()), flat.key_set(), flat.dtype());
  place.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  place.unsafeGetTensorImpl()->set_storage_offset(offset);
  return place;
}

void StoragePool::free(const at::Tensor& tensor) {
  if (!keeps_ || !has_storage(tensor)) return free_storage(tensor);
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const auto known = capacity_.find(storage->data());
  const size_t capacity = known == capacity_.end() ? storage->nbytes() : known->second;
  if (known != capacity_.end()) capacity_.erase(known);
  unused_.emplace(capacity, storage->set_data_ptr(c10::DataPtr(nullptr, storage->device())));
  storage->set_nbytes(0);
}

void StoragePool::allocate(const at::Tensor& tensor) {
  const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
  if (has_storage(tensor) || bytes == 0) return;
  const size_t wanted = std::max(bytes, least_);
  const auto fits = source_ ? unused_.find(wanted) : unused_.lower_bound(wanted);
  const bool found = fits != unused_.end();
  if (!found && !source_) return allocate_storage(tensor);
  const size_t capacity = found ? fits->first : wanted;
  c10::DataPtr memory = found ? std::move(fits->second) : source_(wanted);
  if (found) unused_.erase(fits);
  capacity_[memory.get()] = capacity;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

}  // namespace trireme::parallel
