#pragma once
// The base of optimizers over flat ranges: parameters, and their state as the optimizer's record lists it.
// Private to optim/*.cpp.
#include <ATen/ATen.h>

#include <utility>
#include <vector>

#include "trireme/kernels/moment.h"
#include "trireme/kernels/optimizer.h"
#include "trireme/optim/optimizer.h"

namespace trireme::optim {

/// The elements that one kernel call updates.
struct UpdateRange {
  at::Tensor master, grad, copy;           ///< as FlatParam, or the part of one segment
  kernels::MomentsOfRange moments;         ///< in the order of the optimizer's record
  std::vector<kernels::UpdatePart> parts;  ///< of these tensors
};

class FlatOptimizer : public Optimizer {
 public:
  FlatOptimizer(const plan::OptimConfig& config, std::vector<FlatParam> params);

  void begin_step() override { ++steps_; }
  size_t size() const override { return params_.size(); }
  const at::Tensor& master(size_t index) const override { return params_[index].master; }
  void update(size_t index, const GradScale& grad_scale) override;
  void swap_average(size_t index) override;
  void set_segments(size_t index, std::vector<Segment> segments) override;
  int64_t state_bytes() const override;
  std::vector<std::string_view> state_names() const override;
  at::Tensor state(size_t index, size_t number, const plan::Range& range) const override;
  void set_state(size_t index, size_t number, const plan::Range& range, const at::Tensor& values) override;
  int64_t steps() const override { return steps_; }
  void set_steps(int64_t steps) override { steps_ = steps; }

 protected:
  virtual void update_range(UpdateRange& range, const GradScale& grad_scale) = 0;
  const plan::OptimConfig& config() const { return config_; }
  /// The step under way, from 1.
  int64_t step_number() const { return steps_; }

 private:
  /// Neighbours are updated as one where nothing is rounded by its place in its parameter.
  std::vector<Segment> as_updated(std::vector<Segment> segments) const;
  kernels::UpdatePart part_at(const plan::Range& range, const Group& group) const;
  UpdateRange whole_range(size_t index) const;
  UpdateRange range_of(size_t index, const Segment& segment) const;
  void average(at::Tensor& average, const at::Tensor& master) const;

  plan::OptimConfig config_;
  std::vector<FlatParam> params_;
  int64_t numbers_;                                   ///< that the rule keeps; the average is another one
  std::vector<std::vector<kernels::Moment>> states_;  ///< by parameter, in the order of plan::state_of()
  int64_t steps_ = 0;
};

std::unique_ptr<Optimizer> make_adamw(const plan::OptimConfig& config, std::vector<FlatParam> params);
std::unique_ptr<Optimizer> make_sgd(const plan::OptimConfig& config, std::vector<FlatParam> params);

}  // namespace trireme::optim
