#include "trireme/nn/notes.h"
#include "trireme/nn/torch_internals.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

namespace trireme::nn {
namespace {

class CompleteHook : public torch::autograd::FunctionPostHook {
 public:
  explicit CompleteHook(std::function<void()> callback) : callback_(std::move(callback)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    callback_();
    return outputs;
  }

 private:
  std::function<void()> callback_;
};

class AfterBackward : public torch::autograd::Node {
 public:
  explicit AfterBackward(std::function<void()> callback) : callback_(std::move(callback)) {}

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    callback_();
    return std::move(grads);
  }

 private:
  std::function<void()> callback_;
};

}  // namespace

at::Tensor call_after_backward(const at::Tensor& x, std::function<void()> callback) {
  if (!x.requires_grad() || !at::GradMode::is_enabled()) return x;
  auto node = std::make_shared<AfterBackward>(std::move(callback));
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  at::Tensor y = x.detach();
  torch::autograd::create_gradient_edge(y, std::move(node));
  if (asks_for_gradient_sums(x)) ask_for_gradient_sums(y);
  return y;
}

void call_before_backward(const at::Tensor& y, std::function<void()> callback) {
  if (!y.requires_grad()) return;
  y.register_hook([callback = std::move(callback)](const at::Tensor&) { callback(); });
}

std::shared_ptr<torch::autograd::Node> call_when_complete(const at::Tensor& leaf,
                                                          std::function<void()> callback) {
  std::shared_ptr<torch::autograd::Node> accumulator = torch::autograd::impl::grad_accumulator(leaf);
  auto* const node = accumulator.get();
  const uintptr_t hook = node->add_post_hook(std::make_unique<CompleteHook>(std::move(callback)));
  // A graph that outlives the watch keeps the node.
  const auto end = [accumulator = std::move(accumulator), hook](torch::autograd::Node* watched) {
    watched->del_post_hook(hook);
  };
  return {node, end};
}

bool is_watched(const at::Tensor& leaf, const std::shared_ptr<torch::autograd::Node>& watch) {
  return torch::autograd::impl::grad_accumulator(leaf).get() == watch.get();
}

}  // namespace trireme::nn
