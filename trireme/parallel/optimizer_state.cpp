#include "trireme/parallel/optimizer_state.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::parallel {
namespace {

/// Of an optimizer over the engine's flat units: one tensor of each kind a unit, one number of steps.
class FlatState : public OptimizerState {
 public:
  FlatState(DataParallel& engine, optim::Optimizer& optimizer) : engine_(engine), optimizer_(optimizer) {
    TRIREME_CHECK(optimizer.size() == engine.units().size(),
                  "[parallel.state] the optimizer updates {} units, the engine has {}; build it from "
                  "engine.optimizer_params()",
                  optimizer.size(), engine.units().size());
    for (const optim::NamedState& state : optimizer.state(0)) kinds_.emplace_back(state.name);
  }

  std::string name() const override { return "an optimizer of trireme::optim"; }
  const std::vector<std::string>& kinds() const override { return kinds_; }
  bool needs(size_t) const override { return true; }
  bool has_always(size_t, size_t) const override { return false; }

  ParamState get(size_t unit, size_t param) const override {
    ParamState state{std::vector<at::Tensor>(kinds_.size()), ParamState::kNoStep};
    if (optimizer_.steps() == 0 || !engine_.units()[unit]->params()[param].second.requires_grad())
      return state;
    state.step = optimizer_.steps();
    for (size_t kind = 0; kind < kinds_.size(); ++kind) state.pieces[kind] = place(unit, param, kind);
    return state;
  }

  void set(size_t unit, size_t param, ParamState state) override {
    const at::NoGradGuard no_grad;
    steps_ = std::max(steps_, state.step);
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      at::Tensor mine = place(unit, param, kind);
      if (!state.pieces[kind].defined()) {
        mine.zero_();
        continue;
      }
      steps_ = std::max<int64_t>(steps_, 1);  // SGD of torch does not count, but was stepped
      mine.copy_(state.pieces[kind]);
    }
  }

  void end_of_set() override { optimizer_.set_steps(steps_); }

 private:
  at::Tensor place(size_t unit, size_t param, size_t kind) const {
    const FlatUnit& flat = *engine_.units()[unit];
    const plan::Range part = flat.owned_part(param);
    const at::Tensor values = optimizer_.state(unit)[kind].values;
    return part.size() == 0 ? values.narrow(0, 0, 0)
                            : values.narrow(0, part.begin - flat.optimizer_range().begin, part.size());
  }

  DataParallel& engine_;
  optim::Optimizer& optimizer_;
  std::vector<std::string> kinds_;
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<OptimizerState> state_of(DataParallel& engine, optim::Optimizer& optimizer) {
  return std::make_unique<FlatState>(engine, optimizer);
}

}  // namespace trireme::parallel
