#include "trireme/nn/known_amax.h"

#include <ATen/ATen.h>

#include <utility>

namespace trireme::nn {
namespace {

/// In the slot of a TensorImpl for backend metadata that no backend here uses, as in lent_gradient.cpp: there
/// it is of parameters, here of what is computed.
struct Note : c10::BackendMeta {
  Note(at::Tensor amax_in, int64_t version_in) : amax(std::move(amax_in)), version(version_in) {}
  /// A detached copy may be written to without a sign of it here.
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
  at::Tensor amax;
  int64_t version;  ///< of the tensor when it was noted
};

}  // namespace

bool asks_for_amax(const std::optional<Fp8Recipe>& fp8) {
  return fp8 && fp8->scaling == kernels::Fp8Scaling::kTensor && !fp8->layer.amax.defined();
}

at::Tensor amax_to_raise(const at::Tensor& output, bool asked) {
  return asked && output.is_cuda() ? at::zeros({1}, output.options().dtype(at::kFloat)) : at::Tensor();
}

void note_amax(const at::Tensor& tensor, at::Tensor amax) {
  if (!amax.defined()) return;
  tensor.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<Note>(std::move(amax), tensor._version()));
}

at::Tensor noted_amax(const at::Tensor& tensor, const std::optional<Fp8Recipe>& fp8) {
  if (!asks_for_amax(fp8)) return {};
  const auto* const note = dynamic_cast<const Note*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return note != nullptr && note->version == tensor._version() ? note->amax : at::Tensor();
}

}  // namespace trireme::nn
