#include "trireme/nn/notes.h"

#include <ATen/ATen.h>

#include <utility>

namespace trireme::nn {
namespace {

/// A note in a TensorImpl's slot for backend metadata, which no backend here uses. lent_gradient.cpp uses the
/// slots of parameters, this file those of computed tensors.
struct Note : c10::BackendMeta {
  /// A detached copy may be written to without a sign of it here.
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
  at::Tensor amax, column_sums;
  int64_t version = -1;  ///< of the tensor when they were noted
  bool asks_for_gradient_sums = false;
};

const Note* note_of(const at::Tensor& tensor) {
  return dynamic_cast<const Note*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

/// nullptr where what is known, if anything, is of earlier values.
const Note* current_note_of(const at::Tensor& tensor) {
  const Note* const note = note_of(tensor);
  return note != nullptr && note->version == version_of(tensor) ? note : nullptr;
}

/// A new note of the present values, with what is known of them already.
template <typename Change>
void renew(const at::Tensor& tensor, const Change& change) {
  auto note = c10::make_intrusive<Note>();
  if (const Note* const before = note_of(tensor))
    note->asks_for_gradient_sums = before->asks_for_gradient_sums;
  if (const Note* const before = current_note_of(tensor)) {
    note->amax = before->amax;
    note->column_sums = before->column_sums;
  }
  note->version = version_of(tensor);
  change(*note);
  tensor.unsafeGetTensorImpl()->set_backend_meta(std::move(note));
}

}  // namespace

bool asks_for_amax(const std::optional<Fp8Recipe>& fp8) {
  return fp8 && fp8->scaling == kernels::Fp8Scaling::kTensor && !fp8->layer.amax.defined();
}

at::Tensor amax_to_raise(const at::Tensor& output, bool asked) {
  return asked && output.is_cuda() ? at::zeros({1}, output.options().dtype(at::kFloat)) : at::Tensor();
}

void note_amax(const at::Tensor& tensor, at::Tensor amax) {
  if (amax.defined()) renew(tensor, [&](Note& note) { note.amax = std::move(amax); });
}

void pass_on_amax(const at::Tensor& alias, const at::Tensor& tensor) {
  if (const Note* const note = current_note_of(tensor)) note_amax(alias, note->amax);
}

at::Tensor noted_amax(const at::Tensor& tensor, const std::optional<Fp8Recipe>& fp8) {
  const Note* const note = asks_for_amax(fp8) ? current_note_of(tensor) : nullptr;
  return note == nullptr ? at::Tensor() : note->amax;
}

void ask_for_gradient_sums(const at::Tensor& output) {
  if (output.is_cuda()) renew(output, [](Note& note) { note.asks_for_gradient_sums = true; });
}

bool asks_for_gradient_sums(const at::Tensor& input) {
  const Note* const note = note_of(input);
  return note != nullptr && note->asks_for_gradient_sums;
}

at::Tensor sums_to_fill(const at::Tensor& gradient, bool asked) {
  if (!asked || !gradient.is_cuda() || gradient.numel() == 0) return {};
  return at::empty({gradient.size(-1)}, gradient.options().dtype(at::kFloat));
}

void note_column_sums(const at::Tensor& tensor, at::Tensor sums) {
  if (sums.defined()) renew(tensor, [&](Note& note) { note.column_sums = std::move(sums); });
}

at::Tensor noted_column_sums(const at::Tensor& tensor) {
  const Note* const note = current_note_of(tensor);
  return note == nullptr ? at::Tensor() : note->column_sums;
}

}  // namespace trireme::nn
