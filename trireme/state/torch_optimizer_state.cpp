// The state of torch's optimizers, which each keep in a struct of their own.
#include <ATen/ATen.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <typeinfo>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/state/optimizer_state.h"

namespace trireme::state {
namespace {

/// A tensor of a parameter's state, and whether an optimizer with these options uses it.
template <typename State, typename Options>
struct Field {
  const char* name;
  at::Tensor& (*of)(State& state);
  bool (*used)(const Options& options);
};

template <typename Options>
bool always(const Options&) {
  return true;
}

template <typename State, typename Options>
struct AdamTraits {
  static constexpr const char* kName = "torch::optim::Adam or AdamW";
  static constexpr bool kEager = false;  ///< whether it has state before the first step
  static constexpr std::array<Field<State, Options>, 3> kFields = {
      {{"exp_avg", [](State& state) -> at::Tensor& { return state.exp_avg(); }, always<Options>},
       {"exp_avg_sq", [](State& state) -> at::Tensor& { return state.exp_avg_sq(); }, always<Options>},
       {"max_exp_avg_sq", [](State& state) -> at::Tensor& { return state.max_exp_avg_sq(); },
        [](const Options& options) { return options.amsgrad(); }}}};
};

template <typename State, typename Options>
struct Traits;
template <>
struct Traits<torch::optim::AdamParamState, torch::optim::AdamOptions>
    : AdamTraits<torch::optim::AdamParamState, torch::optim::AdamOptions> {};
template <>
struct Traits<torch::optim::AdamWParamState, torch::optim::AdamWOptions>
    : AdamTraits<torch::optim::AdamWParamState, torch::optim::AdamWOptions> {};

template <>
struct Traits<torch::optim::SGDParamState, torch::optim::SGDOptions> {
  using State = torch::optim::SGDParamState;
  static constexpr const char* kName = "torch::optim::SGD";
  static constexpr bool kEager = false;
  static constexpr std::array<Field<State, torch::optim::SGDOptions>, 1> kFields = {
      {{"momentum_buffer", [](State& state) -> at::Tensor& { return state.momentum_buffer(); },
        [](const torch::optim::SGDOptions& options) { return options.momentum() != 0.0; }}}};
};

template <>
struct Traits<torch::optim::RMSpropParamState, torch::optim::RMSpropOptions> {
  using State = torch::optim::RMSpropParamState;
  using Options = torch::optim::RMSpropOptions;
  static constexpr const char* kName = "torch::optim::RMSprop";
  static constexpr bool kEager = false;
  static constexpr std::array<Field<State, Options>, 3> kFields = {
      {{"square_avg", [](State& state) -> at::Tensor& { return state.square_avg(); }, always<Options>},
       {"momentum_buffer", [](State& state) -> at::Tensor& { return state.momentum_buffer(); },
        [](const Options& options) { return options.momentum() > 0.0; }},
       {"grad_avg", [](State& state) -> at::Tensor& { return state.grad_avg(); },
        [](const Options& options) { return options.centered(); }}}};
};

template <>
struct Traits<torch::optim::AdagradParamState, torch::optim::AdagradOptions> {
  using State = torch::optim::AdagradParamState;
  using Options = torch::optim::AdagradOptions;
  static constexpr const char* kName = "torch::optim::Adagrad";
  static constexpr bool kEager = true;
  static constexpr std::array<Field<State, Options>, 1> kFields = {
      {{"sum", [](State& state) -> at::Tensor& { return state.sum(); }, always<Options>}}};
};

template <typename State>
concept CountsSteps = requires(State& state) {
  state.step(int64_t{});
};

/// The engine's tensors that an optimizer has, by unit and parameter; undefined where it has none.
std::vector<std::vector<at::Tensor>> pieces_of(parallel::DataParallel& engine,
                                               const torch::optim::Optimizer& optimizer) {
  std::map<const c10::TensorImpl*, std::pair<size_t, size_t>> places;
  std::vector<std::vector<at::Tensor>> pieces;
  for (const auto& unit : engine.units()) {
    for (const parallel::FlatUnit::Piece& piece : unit->pieces())
      places.emplace(piece.master.unsafeGetTensorImpl(), std::pair{pieces.size(), piece.param});
    pieces.emplace_back(unit->params().size());
  }
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& tensor : group.params()) {
      const auto place = places.find(tensor.unsafeGetTensorImpl());
      if (place == places.end())
        throw LogicError(
            "[state.optimizer] the optimizer has a tensor [{}] that is not one of "
            "engine->optimizer_tensors(); build it over them, and save your own tensors separately",
            fmt::join(tensor.sizes(), ", "));
      pieces[place->second.first][place->second.second] = tensor;
    }
  }
  return pieces;
}

template <typename State, typename Options>
class TorchState : public OptimizerState {
 public:
  using About = Traits<State, Options>;

  TorchState(parallel::DataParallel& engine, torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer), pieces_(pieces_of(engine, optimizer)) {
    for (const auto& field : About::kFields) {
      kinds_.emplace_back(field.name);
      used_.push_back(std::ranges::any_of(optimizer.param_groups(), [&](const auto& group) {
        return field.used(static_cast<const Options&>(group.options()));
      }));
    }
  }

  std::string name() const override { return About::kName; }
  const std::vector<std::string>& kinds() const override { return kinds_; }
  bool needs(size_t kind) const override { return used_[kind]; }
  bool has_always(size_t unit, size_t param) const override {
    return About::kEager && pieces_[unit][param].defined();
  }

  ParamState get(size_t unit, size_t param) const override {
    ParamState result{std::vector<at::Tensor>(kinds_.size()), ParamState::kNoStep};
    const auto found = optimizer_.state().find(key(unit, param));
    if (!pieces_[unit][param].defined() || found == optimizer_.state().end()) return result;
    State& state = static_cast<State&>(*found->second);
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (const at::Tensor& values = About::kFields[kind].of(state); values.defined())
        result.pieces[kind] = values.reshape({-1});
    }
    if constexpr (CountsSteps<State>) result.step = state.step();
    return result;
  }

  void set(size_t unit, size_t param, ParamState values) override {
    const at::Tensor& piece = pieces_[unit][param];
    if (!piece.defined()) return;
    auto state = std::make_unique<State>();
    bool any = false;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      if (!values.pieces[kind].defined()) continue;
      About::kFields[kind].of(*state) = values.pieces[kind].view(piece.sizes());
      any = true;
    }
    if constexpr (CountsSteps<State>) state->step(std::max<int64_t>(values.step, any ? 1 : 0));
    if (any) {
      optimizer_.state()[key(unit, param)] = std::move(state);
    } else {
      optimizer_.state().erase(key(unit, param));
    }
  }

 private:
  void* key(size_t unit, size_t param) const { return pieces_[unit][param].unsafeGetTensorImpl(); }

  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> pieces_;
  std::vector<std::string> kinds_;
  std::vector<bool> used_;
};

}  // namespace

std::unique_ptr<OptimizerState> state_of(parallel::DataParallel& engine, torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;  // NOLINT: many short names of one family
  if (dynamic_cast<AdamW*>(&optimizer) != nullptr)
    return std::make_unique<TorchState<AdamWParamState, AdamWOptions>>(engine, optimizer);
  if (dynamic_cast<Adam*>(&optimizer) != nullptr)
    return std::make_unique<TorchState<AdamParamState, AdamOptions>>(engine, optimizer);
  if (dynamic_cast<SGD*>(&optimizer) != nullptr)
    return std::make_unique<TorchState<SGDParamState, SGDOptions>>(engine, optimizer);
  if (dynamic_cast<RMSprop*>(&optimizer) != nullptr)
    return std::make_unique<TorchState<RMSpropParamState, RMSpropOptions>>(engine, optimizer);
  if (dynamic_cast<Adagrad*>(&optimizer) != nullptr)
    return std::make_unique<TorchState<AdagradParamState, AdagradOptions>>(engine, optimizer);
  throw LogicError(
      "[state.optimizer] the state of {} cannot be saved here; use AdamW, Adam, SGD, RMSprop or Adagrad, or "
      "save it with torch::save on every rank, beside save_weights()",
      c10::demangle(typeid(optimizer).name()));
}

}  // namespace trireme::state
