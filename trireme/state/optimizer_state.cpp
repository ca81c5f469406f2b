#include "trireme/state/optimizer_state.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/plan/optimizer.h"

namespace trireme::state {
namespace {

/// The state of an optimizer over the engine's flat units: one tensor of each kind for a unit, and one number
/// of steps.
class FlatState : public OptimizerState {
 public:
  FlatState(parallel::DataParallel& engine, optim::Optimizer& optimizer)
      : engine_(engine), optimizer_(optimizer) {
    engine.check_own(optimizer, "state");
    for (const std::string_view name : optimizer.state_names()) kinds_.emplace_back(name);
  }

  std::string name() const override { return "an optimizer of trireme::optim"; }
  const std::vector<std::string>& kinds() const override { return kinds_; }
  bool needs(size_t) const override { return true; }
  bool has_always(size_t, size_t) const override { return false; }

  ParamState get(size_t unit, size_t param) const override {
    ParamState state{std::vector<at::Tensor>(kinds_.size()), ParamState::kNoStep};
    if (optimizer_.steps() == 0 || !engine_.optimizes(unit, param)) return state;
    state.step = optimizer_.steps();
    const plan::Range place = place_of(unit, param);
    for (size_t kind = 0; kind < kinds_.size(); ++kind)
      state.pieces[kind] = optimizer_.state(unit, kind, place);
    return state;
  }

  void set(size_t unit, size_t param, ParamState state) override {
    const at::NoGradGuard no_grad;
    steps_ = std::max(steps_, state.step);
    const plan::Range place = place_of(unit, param);
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      const at::Tensor& values = state.pieces[kind];
      if (values.defined()) steps_ = std::max<int64_t>(steps_, 1);  // torch's SGD does not count its steps
      optimizer_.set_state(unit, kind, place, values.defined() ? values : first_value(unit, kind, place));
    }
  }

  void end_of_set() override { optimizer_.set_steps(steps_); }

 private:
  /// Where this rank's part of a parameter lies in what the optimizer updates.
  plan::Range place_of(size_t unit, size_t param) const {
    const parallel::FlatUnit& flat = *engine_.units()[unit];
    const plan::Range part = flat.owned_part(param);
    if (part.size() == 0) return {};
    const int64_t begin = flat.optimizer_range().begin;
    return {part.begin - begin, part.end - begin};
  }

  /// The state of a parameter in an optimizer that has made no step.
  at::Tensor first_value(size_t unit, size_t kind, const plan::Range& place) const {
    const at::Tensor master = engine_.units()[unit]->master().narrow(0, place.begin, place.size());
    return kinds_[kind] == plan::kAverageState ? master : at::zeros_like(master);
  }

  parallel::DataParallel& engine_;
  optim::Optimizer& optimizer_;
  std::vector<std::string> kinds_;
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<OptimizerState> state_of(parallel::DataParallel& engine, optim::Optimizer& optimizer) {
  return std::make_unique<FlatState>(engine, optimizer);
}

}  // namespace trireme::state
