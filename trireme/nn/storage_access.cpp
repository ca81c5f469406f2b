#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "trireme/nn/torch_internals.h"

namespace trireme::nn {
namespace {

bool& refuses_access(c10::StorageImpl& storage);

/// Torch can make a storage refuse access for good; a parameter's is gathered again, so the refusal must end.
/// An explicit instantiation may name what is private.
template <bool c10::StorageImpl::*kFlag>
struct FlagAccess {
  friend bool& refuses_access(c10::StorageImpl& storage) { return storage.*kFlag; }
};
template struct FlagAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void refuse_access(const at::Tensor& tensor, std::string reason) {
  tensor.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::move(reason));
}

void allow_access(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (!refuses_access(storage)) return;
  refuses_access(storage) = false;
  storage.set_data_ptr_noswap(std::move(storage._mutable_data_ptr_no_checks()));
}

}  // namespace trireme::nn
