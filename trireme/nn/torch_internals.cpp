#include "trireme/nn/torch_internals.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/version.h>

#include <mutex>
#include <string>

#include "trireme/base/error.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void expect(bool holds, const char* assumption) {
  if (holds) return;
  throw EnvironmentError(
      "[nn.torch_internals] libtorch {} breaks an assumption of Trireme: {}; use libtorch 2.11",
      TORCH_VERSION, assumption);
}

at::Tensor leaf_of(float value) {
  return at::full({2}, value, at::kFloat).requires_grad_();
}

/// x * w, whose backward writes the gradient of w past autograd.
struct WritesPastAutograd : torch::autograd::Function<WritesPastAutograd> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    if (at::Tensor first = claim_gradient(saved[1]); first.defined()) {
      first.copy_(grads[0] * saved[0]);
    } else {
      gradient_to_add_to(saved[1]).add_(grads[0] * saved[0]);
    }
    return {grads[0] * saved[1], at::Tensor()};
  }
};

void check_loans() {
  const at::Tensor flat = at::zeros({4}, at::kFloat), memory = at::full({2}, 7.0f, at::kFloat),
                   x = leaf_of(3.0f);
  at::Tensor param = leaf_of(2.0f);
  param.set_data(flat.narrow(0, 2, 2).fill_(2.0f));
  lend_gradient(param, memory);
  expect(has_lender(param), "the lender of a gradient stays with its parameter");
  expect(!has_lender(param.detach()), "a detached copy does not take over what was lent to its parameter");
  int completed = 0;
  const auto accumulator = call_when_complete(param, [&] { ++completed; });
  const auto pass = [&] { WritesPastAutograd::apply(x, param).sum().backward(); };
  pass();
  expect(completed == 1, "a parameter's node calls its hooks although its function has reported no gradient");
  expect(param.grad().is_alias_of(memory) && memory[0].item<float>() == 3.0f,
         "a function finds memory lent for the gradient of a tensor that it saved");
  pass();
  (param * x).sum().backward();
  expect(completed == 3 && param.grad().is_alias_of(memory) && memory[0].item<float>() == 9.0f,
         "autograd adds to an existing gradient in place");
  expect(param.is_alias_of(flat), "a parameter stays a view of the memory that it was given");
}

/// bf16 gradients of several micro-batches are added up in fp32.
void check_sums() {
  const at::Tensor sum = at::full({2}, 1.0f, at::kFloat), x = at::full({2}, 1.0f / 512, at::kBFloat16);
  at::Tensor param = at::ones({2}, at::kBFloat16).requires_grad_();
  param.mutable_grad() = sum;
  (param * x).sum().backward();
  expect(param.grad().is_alias_of(sum) && sum[0].item<float>() == 1.0f + 1.0f / 512,
         "autograd adds a bf16 gradient to an fp32 one in place");
}

void check_hooks() {
  std::string order;
  const at::Tensor x = leaf_of(1.0f), w = leaf_of(3.0f);
  w.register_hook([&](const at::Tensor&) { order += "weight "; });
  const at::Tensor input = call_after_backward(x, [&] { order += "after"; });
  const at::Tensor output = input + input * w;
  call_before_backward(output, [&] { order += "before "; });
  output.sum().backward();
  expect(order == "before weight after" && x.grad()[0].item<float>() == 4.0f,
         "hooks run before a block's first and after its last gradient");
}

void check_touches() {
  std::vector<size_t> seen;
  const at::Tensor param = leaf_of(2.0f), x = leaf_of(3.0f);
  {
    TouchWatch watch([&](const std::vector<size_t>& tokens, Nesting) {
      seen.insert(seen.end(), tokens.begin(), tokens.end());
    });
    watch.mark(param, 5);
    const at::Tensor product = x * param.view({2});
    expect(!seen.empty() && seen.front() == 5, "an operator on a view of a marked parameter is noticed");
    seen.clear();
    product.sum().backward();
    expect(!seen.empty(), "an operator of backward on a parameter that was saved is noticed");
  }
  seen.clear();
  (param * x).sum();
  expect(seen.empty(), "marks can be taken off");
}

void check_writes() {
  int writes = 0;
  at::Tensor param = leaf_of(2.0f);
  const at::Tensor flat = at::zeros({4}, at::kFloat);
  param.set_data(flat.narrow(0, 2, 2));
  const int64_t version = param._version();
  flat.fill_(1.0f);
  expect(param._version() == version,
         "a write to a flat buffer leaves the version of the parameters in it alone");
  TouchWatch watch([](const std::vector<size_t>&, Nesting) {},
                   [&](size_t, int64_t offset) { writes += offset == 2 ? 1 : 100; });
  watch.mark(param, 0);
  (param + 1).sum();
  expect(writes == 0, "an operator that reads a parameter writes nothing");
  param.data().fill_(3.0f);
  expect(writes == 1 && param._version() == version, "a write through data() is noticed by its operator");
  const at::NoGradGuard no_grad;
  param.fill_(4.0f);
  expect(param._version() > version, "a write to a parameter increases its version");
}

bool is_refused(const at::Tensor& tensor, const std::string& reason) {
  try {
    return tensor.const_data_ptr() == nullptr && false;
  } catch (const c10::Error& error) {
    return std::string(error.what()).find(reason) != std::string::npos;
  }
}

void check_refusals() {
  const at::Tensor flat = at::zeros({4}, at::kFloat), part = flat.narrow(0, 2, 2);
  refuse_access(flat, "a reason");
  expect(is_refused(part, "a reason"), "a storage refuses access with a reason that it was given");
  allow_access(flat);
  expect(part.const_data_ptr<float>()[0] == 0.0f, "and gives access again");
}

}  // namespace

void check_torch_internals() {
  static std::once_flag checked;
  std::call_once(checked, [] {
    const at::AutoGradMode with_gradients(true);
    check_loans();
    check_sums();
    check_hooks();
    check_touches();
    check_writes();
    check_refusals();
  });
}

}  // namespace trireme::nn
