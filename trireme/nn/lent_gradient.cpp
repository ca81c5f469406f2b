#include "trireme/nn/lent_gradient.h"

namespace trireme::nn {
namespace {

/// Travels with the parameter, in the place that tensors have for what their backend adds to them.
struct Loan : c10::BackendMeta {
  explicit Loan(at::Tensor lent) : memory(std::move(lent)) {}
  /// Detached copies of a parameter have borrowed nothing.
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
  at::Tensor memory;
};

const Loan* loan_of(const at::Tensor& param) {
  return dynamic_cast<const Loan*>(param.unsafeGetTensorImpl()->get_backend_meta());
}

}  // namespace

void lend_gradient(const at::Tensor& param, const at::Tensor& memory) {
  param.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Loan>(memory));
}

bool has_lender(const at::Tensor& param) {
  return loan_of(param) != nullptr;
}

at::Tensor claim_gradient(const at::Tensor& param) {
  if (!can_claim_gradient(param)) return {};
  param.mutable_grad() = loan_of(param)->memory;
  return param.grad();
}

bool can_claim_gradient(const at::Tensor& param) {
  const Loan* const loan = loan_of(param);
  return loan != nullptr && loan->memory.defined() && !param.grad().defined();
}

}  // namespace trireme::nn
