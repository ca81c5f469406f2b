#pragma once
// What optimizers over flat ranges share: parameters, and their state as the optimizer's record lists it.
// Private to optim/*.cpp.
#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "trireme/optim/optimizer.h"

namespace trireme::optim {

/// The part of a parameter's tensors that one kernel call updates.
struct UpdateRange {
  at::Tensor master, grad, copy;  ///< as FlatParam
  std::vector<at::Tensor> state;  ///< in the order of plan::state_of()
  double lr = 0.0, weight_decay = 0.0;
};

class FlatOptimizer : public Optimizer {
 public:
  FlatOptimizer(const plan::OptimConfig& config, std::vector<FlatParam> params);

  void begin_step() override { ++steps_; }
  size_t size() const override { return params_.size(); }
  void update(size_t index, const GradScale& grad_scale) override;
  void swap_average(size_t index) override;
  void set_segments(size_t index, std::vector<Segment> segments) override;
  int64_t state_bytes() const override;
  std::vector<NamedState> state(size_t index) const override;
  int64_t steps() const override { return steps_; }
  void set_steps(int64_t steps) override { steps_ = steps; }

 protected:
  virtual void update_range(UpdateRange& range, const GradScale& grad_scale) = 0;
  const plan::OptimConfig& config() const { return config_; }
  /// The step under way, from 1.
  int64_t step_number() const { return steps_; }

 private:
  void average(at::Tensor& average, const at::Tensor& master) const;

  plan::OptimConfig config_;
  std::vector<FlatParam> params_;
  std::vector<std::vector<at::Tensor>> states_;  ///< by parameter
  int64_t steps_ = 0;
};

std::unique_ptr<Optimizer> make_adamw(const plan::OptimConfig& config, std::vector<FlatParam> params);
std::unique_ptr<Optimizer> make_sgd(const plan::OptimConfig& config, std::vector<FlatParam> params);

}  // namespace trireme::optim
