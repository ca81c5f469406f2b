#pragma once
// The data-parallel engine: DDP, ZeRO and FSDP as rows of plan/policy.h over one code path. It wraps a module
// without changing it: its parameters become views of flat units, and run_unit() gathers, frees and reduces
// around blocks.
//
// A step:  for each micro-batch { begin_forward(); loss = model->loss(...); backward(loss, scale, last); }
//          local_grad_squares() -> clip factor; optimizer->step(); finish_step();
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/world.h"
#include "trireme/parallel/flat_unit.h"
#include "trireme/plan/model_facts.h"

namespace trireme::parallel {

class DataParallel {
 public:
  /// `units` name every parameter of `module` exactly once; the first is the root, whose parameters stay
  /// gathered from the start of a forward pass to the end of backward. `module` must outlive this.
  /// Collective.
  DataParallel(torch::nn::Module& module, const std::vector<plan::UnitSpec>& units, const comm::Mesh& mesh,
               const FlatOptions& options, const Initializer& initializer);

  /// Runs a block between gathering and freeing its unit, and arranges the same for backward; give it to
  /// LanguageModel::set_unit_runner.
  at::Tensor run_unit(const std::string& unit, const at::Tensor& x,
                      const std::function<at::Tensor(const at::Tensor&)>& forward);

  /// Before any forward pass, also of validation.
  void begin_forward();
  /// Differentiates `scale * loss` and reduces gradients as they become complete.
  void backward(const at::Tensor& loss, double scale, bool last_micro_batch);

  /// Sum of squares of this rank's part of the gradient; the sum over the data-parallel group is the squared
  /// norm.
  double local_grad_squares() const;
  std::vector<optim::FlatParam> optimizer_params() const;
  /// After the optimizer's update. Collective.
  void finish_step();

  /// Keeps all parameters gathered while held, for many forward passes in a row without gradients.
  class Held {
   public:
    explicit Held(DataParallel& engine);
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    DataParallel& engine_;
  };

  /// Calls body(name, fp32 CPU tensor) for every parameter in name order, on every rank. Gathers one unit at
  /// a time.
  void visit_weights(const std::function<void(const std::string&, const at::Tensor&)>& body) const;

 private:
  FlatUnit& unit(const std::string& name);

  std::vector<std::unique_ptr<FlatUnit>> units_;
  bool last_micro_batch_ = true;
  bool reshard_after_forward_;
  bool held_ = false;
};

/// XXH3-64 of all fp32 master parameters in name order, padding excluded: equal weights, equal digest,
/// whatever the layout. Collective; the same text on every rank.
std::string weights_digest(const DataParallel& engine);

}  // namespace trireme::parallel
