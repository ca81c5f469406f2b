#include "trireme/memory/recompute.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/custom_class.h>

#include <array>
#include <mutex>
#include <optional>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::memory {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Body = std::function<at::Tensor(const at::Tensor&)>;

/// A copy of the state of a device's default generator, from which dropout draws.
class RandomState {
 public:
  explicit RandomState(c10::Device device) : device_(device), state_(generator().get_state()) {}
  void set() const {
    at::Generator target = generator();
    const std::lock_guard lock(target.mutex());
    target.set_state(state_);
  }
  c10::Device device() const { return device_; }

 private:
  at::Generator generator() const { return at::globalContext().defaultGenerator(device_); }

  c10::Device device_;
  at::Tensor state_;
};

/// A thread's settings of autocast, which decide in which dtype operators compute.
class AutocastState {
 public:
  AutocastState() {
    for (size_t i = 0; i < kDevices.size(); ++i) {
      enabled_[i] = at::autocast::is_autocast_enabled(kDevices[i]);
      dtype_[i] = at::autocast::get_autocast_dtype(kDevices[i]);
    }
  }
  void set() const {
    for (size_t i = 0; i < kDevices.size(); ++i) {
      at::autocast::set_autocast_enabled(kDevices[i], enabled_[i]);
      at::autocast::set_autocast_dtype(kDevices[i], dtype_[i]);
    }
    at::autocast::set_autocast_cache_enabled(caches_);
  }
  /// Copies of weights that a pass without gradients has cast know nothing of the weights: a pass with
  /// gradients must not find them in the cache.
  AutocastState without_cache() const {
    AutocastState state = *this;
    state.caches_ = false;
    return state;
  }

 private:
  static constexpr std::array kDevices = {at::kCPU, at::kCUDA};

  std::array<bool, kDevices.size()> enabled_{};
  std::array<at::ScalarType, kDevices.size()> dtype_{};
  bool caches_ = at::autocast::is_autocast_cache_enabled();
};

/// Sets this thread's autocast to `wanted`, and back to what it was when this is destroyed.
class RestoredAutocast {
 public:
  explicit RestoredAutocast(const AutocastState& wanted) { wanted.set(); }
  ~RestoredAutocast() { before_.set(); }
  RestoredAutocast(const RestoredAutocast&) = delete;
  RestoredAutocast& operator=(const RestoredAutocast&) = delete;

 private:
  AutocastState before_;
};

/// Sets the generator to `wanted`, and back to what it was when this is destroyed.
class Restored {
 public:
  explicit Restored(const RandomState& wanted) : before_(wanted.device()) { wanted.set(); }
  ~Restored() { before_.set(); }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  RandomState before_;
};

struct Forward : torch::CustomClassHolder {
  Forward(Body forward, Body again, c10::Device device, bool draws)
      : call(std::move(forward)), call_again(again ? std::move(again) : call) {
    if (draws) random.emplace(device);
  }
  Body call, call_again;
  std::optional<RandomState> random;  ///< none: `call` draws nothing
  AutocastState autocast = AutocastState().without_cache();
};

/// Backward below runs a pass of its own, which neither records a graph nor knows of which tensors the
/// outer pass wants gradients.
void check_pass() {
  if (at::GradMode::is_enabled()) {
    throw LogicError(
        "[memory.recomputed] backward was called with create_graph=true, but a recomputed function has no "
        "second derivative; call backward without create_graph, or call the function without recomputed()");
  }
  if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
    throw LogicError(
        "[memory.recomputed] gradients were asked for of certain tensors only (torch::autograd::grad, or "
        "backward with inputs), but a recomputed function adds to grad() of all of its parameters; call "
        "backward without inputs, or call the function without recomputed()");
  }
}

class RecomputedFunction : public Function<RecomputedFunction> {
 public:
  /// `always` requires a gradient, so that parameters inside get theirs even where x needs none.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& always,
                            const c10::intrusive_ptr<Forward>& forward) {
    static_cast<void>(always);
    context->save_for_backward({x});
    context->saved_data["forward"] = c10::IValue::make_capsule(forward);
    context->saved_data["x_requires_grad"] = x.requires_grad();
    const RestoredAutocast autocast(forward->autocast);
    return forward->call(x);  // autograd is off in here
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    check_pass();
    const auto forward =
        c10::static_intrusive_pointer_cast<Forward>(context->saved_data["forward"].toCapsule());
    const at::AutoGradMode record(true);
    const bool wants_x = context->saved_data["x_requires_grad"].toBool();
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(wants_x);
    at::Tensor y;
    {
      std::optional<Restored> restored;
      if (forward->random) restored.emplace(*forward->random);
      const RestoredAutocast autocast(forward->autocast);
      y = forward->call_again(x);
    }
    if (y.requires_grad()) y.backward(grads[0]);  // else all that `forward` uses is frozen
    return {wants_x ? x.grad() : at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor recomputed(const at::Tensor& x, const Body& forward, bool draws, const Body& again) {
  if (!at::GradMode::is_enabled()) return forward(x);
  const at::Tensor always =
      at::empty({0}, at::TensorOptions().device(x.device()).dtype(at::kFloat)).requires_grad_();
  return RecomputedFunction::apply(x, always,
                                   c10::make_intrusive<Forward>(forward, again, x.device(), draws));
}

}  // namespace trireme::memory
