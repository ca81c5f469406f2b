#include "trireme/nn/notes.h"
#include "trireme/nn/torch_internals.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

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

constexpr int kNoPass = -1;

/// The use that the backward pass under way makes of `node`. `info` is nullptr if the pass does not need the
/// node; `all`: the pass is for whatever it reaches.
struct Task {
  bool all = true;
  const torch::autograd::GraphTask::ExecInfo* info = nullptr;

  explicit Task(torch::autograd::Node* node) {
    const auto* const nodes = torch::autograd::get_current_graph_task_exec_info();
    if (nodes == nullptr || nodes->empty()) return;
    all = false;
    const auto found = nodes->find(node);
    if (found != nodes->end() && found->second.should_execute()) info = &found->second;
  }
  bool reaches() const { return all || info != nullptr; }
  /// The gradient goes into the node, and not to the caller of the pass.
  bool executes() const { return all || (info != nullptr && info->needed_ && !info->captures_); }
};

/// Whether a hook on a leaf, or on the node that adds up its gradient, gets the gradient.
bool is_looked_at(torch::autograd::Node& accumulator) {
  const auto looks = [](const auto& hook) {
    return dynamic_cast<const CompleteHook*>(hook.get()) == nullptr;
  };
  return !accumulator.tensor_pre_hooks().empty() || !accumulator.pre_hooks().empty() ||
         accumulator.tensor_post_acc_grad_hooks() != nullptr ||
         std::ranges::any_of(accumulator.post_hooks(), looks);
}

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

bool is_reached(const at::Tensor& param) {
  if (!param.defined() || !param.requires_grad()) return false;
  return Task(torch::autograd::impl::gradient_edge(param).function.get()).reaches();
}

bool may_write_gradient(const at::Tensor& param) {
  if (!param.is_leaf() || !param.requires_grad()) return false;
  if (torch::autograd::get_current_graph_task_id() == kNoPass) return true;
  const std::shared_ptr<torch::autograd::Node> node = torch::autograd::impl::grad_accumulator(param);
  auto* const accumulator = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get());
  return accumulator != nullptr && accumulator->variable.is_same(param) && Task(node.get()).executes() &&
         !is_looked_at(*node);
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
