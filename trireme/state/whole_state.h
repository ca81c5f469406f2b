#pragma once
// The training state of all ranks as one list of named tensors, and the way to put each together. What a file
// of whole tensors is written from. Private to state/*.cpp.
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "trireme/state/optimizer_state.h"

namespace trireme::state {

inline constexpr const char* kOptimizerPrefix = "optimizer.";

/// "optimizer.exp_avg.head.weight"; the kind "step" is the number of updates.
std::string optimizer_name(const std::string& kind, const std::string& param);

struct StateTensor {
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
};

/// Buffers of a module that have data, each once, by its first name; and its other names.
struct ModuleBuffers {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::map<std::string, std::string> aliases;  ///< alias -> name
};
ModuleBuffers module_buffers(const torch::nn::Module& module);

class WholeState {
 public:
  /// With the state of `optimizer`, unless it is null. Collective. Throws LogicError between two averages of
  /// local SGD.
  WholeState(parallel::DataParallel& engine, const OptimizerState* optimizer);

  const std::map<std::string, StateTensor>& tensors() const { return tensors_; }
  /// Every other name of a parameter or buffer -> the one that it comes under.
  const std::map<std::string, std::string>& aliases() const { return aliases_; }
  /// Calls body(name, whole tensor) once for each of tensors(), on every rank. The tensors are on the
  /// engine's device and may be memory in use. Holds one tensor of one unit at a time. Collective.
  void visit(const std::function<void(const std::string&, const at::Tensor&)>& body) const;

 private:
  /// What the ranks together have of a parameter's optimizer state.
  struct Known {
    std::vector<bool> kinds;
    int64_t step = ParamState::kNoStep;
  };
  void declare(const std::string& name, StateTensor tensor);
  void agree();
  void visit_optimizer(size_t unit,
                       const std::function<void(const std::string&, const at::Tensor&)>& body) const;

  parallel::DataParallel& engine_;
  const OptimizerState* optimizer_;
  std::map<std::string, StateTensor> tensors_;
  std::map<std::string, std::string> aliases_;
  std::vector<std::vector<Known>> known_;  ///< by unit and parameter
};

}  // namespace trireme::state
