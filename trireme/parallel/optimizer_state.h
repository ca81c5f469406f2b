#pragma once
// The state of an optimizer, ours or torch's, by unit and parameter. Private to parallel/*.cpp.
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

namespace trireme::parallel {

/// Of one parameter: this rank's part of each kind, in the order of OptimizerState::kinds(); an undefined
/// tensor where there is none, an empty one where this rank has no elements. step: updates so far; kNoStep
/// where that is not counted or there are none.
struct ParamState {
  static constexpr int64_t kNoStep = -1;
  std::vector<at::Tensor> pieces;
  int64_t step = kNoStep;
};

class OptimizerState {
 public:
  virtual ~OptimizerState() = default;
  /// For messages: what it is.
  virtual std::string name() const = 0;
  /// The kinds of fp32 numbers that it keeps for elements of parameters.
  virtual const std::vector<std::string>& kinds() const = 0;
  /// Whether it cannot go on without `kind` where a parameter has state.
  virtual bool needs(size_t kind) const = 0;
  /// Whether it has state of a parameter before the first step, and cannot begin without.
  virtual bool has_always(size_t unit, size_t param) const = 0;
  virtual ParamState get(size_t unit, size_t param) const = 0;
  /// `state` of this rank's part of a parameter, (elements) fp32 on the device, becomes the optimizer's.
  virtual void set(size_t unit, size_t param, ParamState state) = 0;
  /// After all of them.
  virtual void end_of_set() {}
};

std::unique_ptr<OptimizerState> state_of(DataParallel& engine, optim::Optimizer& optimizer);
/// Throws LogicError naming the type when it is not one of those of state.h, and a tensor that is none of the
/// engine's.
std::unique_ptr<OptimizerState> state_of(DataParallel& engine, torch::optim::Optimizer& optimizer);

}  // namespace trireme::parallel
