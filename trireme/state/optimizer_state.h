#pragma once
// The state of an optimizer, ours or torch's, by unit and parameter. Private to state/*.cpp.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/parallel/data_parallel.h"

namespace torch::optim {
class Optimizer;
}

namespace trireme::state {

/// The state of one parameter. pieces: this rank's part of each kind, in the order of
/// OptimizerState::kinds(); undefined where there is no state, empty where this rank has no elements. step:
/// updates so far; kNoStep where they are not counted or there were none.
struct ParamState {
  static constexpr int64_t kNoStep = -1;
  std::vector<at::Tensor> pieces;
  int64_t step = kNoStep;
};

class OptimizerState {
 public:
  virtual ~OptimizerState() = default;
  /// The optimizer's name in messages.
  virtual std::string name() const = 0;
  /// The kinds of fp32 numbers that it keeps for elements of parameters.
  virtual const std::vector<std::string>& kinds() const = 0;
  /// Whether it cannot go on without `kind` where a parameter has state.
  virtual bool needs(size_t kind) const = 0;
  /// Whether it has state of a parameter even before the first step, and needs it to begin.
  virtual bool has_always(size_t unit, size_t param) const = 0;
  virtual ParamState get(size_t unit, size_t param) const = 0;
  /// Makes `state`, of this rank's part of a parameter, (elements) fp32 on the device, the optimizer's state.
  virtual void set(size_t unit, size_t param, ParamState state) = 0;
  /// To be called after the last set().
  virtual void end_of_set() {}
};

std::unique_ptr<OptimizerState> state_of(parallel::DataParallel& engine, optim::Optimizer& optimizer);
/// Throws LogicError naming the type when it is not one of those of state.h, and a tensor that is none of the
/// engine's.
std::unique_ptr<OptimizerState> state_of(parallel::DataParallel& engine, torch::optim::Optimizer& optimizer);

}  // namespace trireme::state
