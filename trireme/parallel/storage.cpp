#include "trireme/parallel/storage.h"

#include <c10/core/StorageImpl.h>

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

}  // namespace trireme::parallel
