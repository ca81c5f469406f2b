#include "trireme/nn/torch_internals.h"

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace trireme::nn {
namespace {

/// Kept in the parameter's TensorImpl, in the slot for backend metadata that no backend here uses.
struct Loan : c10::BackendMeta {
  explicit Loan(at::Tensor lent) : memory(std::move(lent)) {}
  /// torch copies metadata to detached copies of a tensor; they must not claim the parameter's gradient.
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
  at::Tensor memory;
  kernels::Fp8Matrix weights;
  at::Tensor blocks;  ///< in NF4
  std::vector<c10::Stream> writers;
};

Loan* loan_of(const at::Tensor& param) {
  return dynamic_cast<Loan*>(param.unsafeGetTensorImpl()->get_backend_meta());
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void note_writer(Loan& loan, const at::Tensor& param) {
  if (param.is_cpu()) return;
  const c10::Stream stream = current_stream(param.device());
  if (std::ranges::find(loan.writers, stream) == loan.writers.end()) loan.writers.push_back(stream);
}

}  // namespace

void lend_gradient(const at::Tensor& param, const at::Tensor& memory) {
  auto loan = c10::make_intrusive<Loan>(memory);
  loan->weights = lent_fp8(param);
  loan->blocks = lent_nf4(param);
  param.unsafeGetTensorImpl()->set_backend_meta(std::move(loan));
}

void lend_fp8(const at::Tensor& first, const kernels::Fp8Matrix& matrix) {
  if (loan_of(first) == nullptr) lend_gradient(first, {});
  loan_of(first)->weights = matrix;
}

kernels::Fp8Matrix lent_fp8(const at::Tensor& first) {
  const Loan* const loan = loan_of(first);
  return loan == nullptr ? kernels::Fp8Matrix() : loan->weights;
}

void lend_nf4(const at::Tensor& weight, const at::Tensor& blocks) {
  if (loan_of(weight) == nullptr) lend_gradient(weight, {});
  loan_of(weight)->blocks = blocks;
}

at::Tensor lent_nf4(const at::Tensor& weight) {
  const Loan* const loan = loan_of(weight);
  return loan == nullptr ? at::Tensor() : loan->blocks;
}

bool has_lender(const at::Tensor& param) {
  return loan_of(param) != nullptr;
}

at::Tensor claim_gradient(const at::Tensor& param) {
  if (!can_claim_gradient(param)) return {};
  Loan& loan = *loan_of(param);
  note_writer(loan, param);
  param.mutable_grad() = loan.memory;
  return param.grad();
}

bool can_claim_gradient(const at::Tensor& param) {
  const Loan* const loan = loan_of(param);
  return loan != nullptr && loan->memory.defined() && !param.grad().defined() && may_write_gradient(param);
}

at::ScalarType gradient_dtype(const at::Tensor& param) {
  if (!may_write_gradient(param)) return param.scalar_type();
  if (param.grad().defined()) return param.grad().scalar_type();
  return can_claim_gradient(param) ? loan_of(param)->memory.scalar_type() : param.scalar_type();
}

at::Tensor gradient_to_add_to(const at::Tensor& param) {
  if (!may_write_gradient(param)) return {};
  at::Tensor grad = param.grad();
  if (Loan* const loan = loan_of(param); loan != nullptr && grad.defined()) note_writer(*loan, param);
  return grad;
}

void follow_gradient_writers(const at::Tensor& param) {
  Loan* const loan = loan_of(param);
  if (loan == nullptr || loan->writers.empty()) return;
  const c10::Stream here = current_stream(param.device());
  for (const c10::Stream& writer : loan->writers) {
    if (writer == here) continue;
    c10::Event written(writer.device_type());
    written.record(writer);
    written.block(here);
  }
  loan->writers.clear();
}

}  // namespace trireme::nn
