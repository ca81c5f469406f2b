// What ends a step: the norm of its gradient, the update, or neither.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/kernels/range.h"
#include "trireme/parallel/data_parallel.h"

namespace trireme::parallel {
namespace {

optim::GradScale product(const optim::GradScale& a, const optim::GradScale& b) {
  optim::GradScale result(a.host * b.host);
  result.device = a.device.defined() && b.device.defined() ? a.device * b.device
                  : a.device.defined()                     ? a.device
                                                           : b.device;
  return result;
}

}  // namespace

at::Tensor DataParallel::unit_grad_squares() const {
  std::vector<at::Tensor> squares;
  for (const auto& unit : units_) squares.push_back(unit->grad_squares());
  return at::stack(squares);
}

at::Tensor DataParallel::param_grad_squares(const std::string& parameter) const {
  const auto [unit, index] = place_of(parameter);
  if (!completion_.trainable()[unit][index]) return at::zeros_like(units_[unit]->grad_squares());
  return units_[unit]->grad_squares_of(index);
}

double DataParallel::sum_over_ranks(const std::vector<double>& by_dp_rank) const {
  const int64_t shards = groups_.shard->size(), replicas = groups_.replicate->size();
  double sum = 0.0;
  // Pieces in the order of the flat buffers; without replicas that is the order of ranks.
  for (int64_t shard = 0; shard < shards; ++shard) {
    for (int64_t replica = 0; replica < replicas; ++replica) {
      sum += by_dp_rank[static_cast<size_t>(replica * shards + shard)];
    }
  }
  return sum;
}

at::Tensor DataParallel::sum_over_ranks(const at::Tensor& by_dp_rank) const {
  return by_dp_rank.view({groups_.replicate->size(), groups_.shard->size()}).t().reshape({-1}).sum();
}

double DataParallel::grad_norm(const std::vector<std::string>& without) const {
  if (handed_out_ && complete_) return handed_out_norm(without);
  double mine = local_grad_squares();
  for (const std::string& parameter : without) mine -= param_grad_squares(parameter).item<double>();
  return norm_of(mine) * mean_.to_norm();
}

/// The norm of what the ranks have by the squares of each. Sums have no weights that ranks exchange, so here
/// they compare what is frozen.
double DataParallel::norm_of(double mine) const {
  if (mine < 0.0) mine = 0.0;  // by rounding; what is not finite stays so
  const Completion::Flags& trainable = completion_.trainable();
  const auto [upper, lower] = frozen_alike_.note(trainable);
  std::vector<double> squares;
  std::vector<std::array<double, 2>> notes;
  for (const auto& rank : comm::gather_scalars(*mesh_.dp, {mine, upper, lower})) {
    squares.push_back(rank[0]);
    notes.push_back({rank[1], rank[2]});
  }
  frozen_alike_.compare(notes, trainable);
  if (mesh_.tp->size() == 1) return std::sqrt(sum_over_ranks(squares));
  double sum = 0.0;
  for (const auto& rank : comm::gather_scalars(*mesh_.tp, {sum_over_ranks(squares)})) sum += rank[0];
  return std::sqrt(sum);
}

/// Measures again, since others may have edited what was handed out, and torch's own clip_grad_value_() does
/// so past the version counters that would tell.
double DataParallel::handed_out_norm(const std::vector<std::string>& without) const {
  std::vector<at::Tensor> of_units;
  for (const auto& unit : units_) of_units.push_back(unit->piece_grad_squares());
  double mine = at::stack(of_units).sum().item<double>();
  for (const std::string& parameter : without) {
    const auto [unit, index] = place_of(parameter);
    mine -= units_[unit]->piece_grad_squares_of(index).item<double>();
  }
  return norm_of(mine);
}

double DataParallel::clip_grad_norm(double max_norm) {
  check_complete("clip_grad_norm");
  TRIREME_CHECK(max_norm > 0.0, "[parallel.clip_grad_norm] max_norm is {}; give a positive number",
                number_text(max_norm));
  const double norm = grad_norm();
  scale_gradient(optim::clip_factor(norm, max_norm));
  return norm;
}

void DataParallel::scale_gradient(double factor) {
  check_complete("scale_gradient");
  mean_.scale(factor, /*applied=*/handed_out_);
  if (!handed_out_ || factor == 1.0) return;
  for (const auto& unit : units_) unit->scale_piece_gradients(factor);
}

/// The end of a step's last backward pass.
void DataParallel::complete_gradient() {
  completion_.forget();
  if (!averages_before_hook()) settle_mean();
  complete_ = true;
  shared_.remark.clear();
  for (const auto& unit : units_) {
    if (!unit->trainable()) unit->clear_gradients();
  }
  if (!handed_out_) return;
  for (const auto& unit : units_) unit->show_piece_gradients(mean_.to_update());
  mean_.hand_out();
}

std::string DataParallel::nonfinite_parameter() const {
  for (const auto& unit : units_) {
    if (std::string name = unit->nonfinite_parameter(); !name.empty()) return name;
  }
  return {};
}

void DataParallel::check_complete(const char* operation) const {
  check_usable();
  check_not_evaluating(operation);
  if (complete_) return;
  throw LogicError(
      "[parallel.{}] rank {}: there is no complete gradient since the last update, or the backward pass "
      "failed; call backward() for the last micro-batch first (use accumulate() for the others)",
      operation, mesh_.world->rank());
}

void DataParallel::step(optim::Optimizer& optimizer) {
  step_scaled(optimizer, {});
}

void DataParallel::step_scaled(optim::Optimizer& optimizer, const optim::GradScale& grad_scale) {
  const at::NoGradGuard no_grad;
  const kernels::TraceRange range("update");
  check_complete("step");
  TRIREME_CHECK(!handed_out_,
                "[parallel.step] the gradients were handed out by optimizer_tensors(); step with the "
                "optimizer built over them");
  check_own(optimizer, "step");
  follow_frozen(optimizer);
  complete_ = false;
  take_writes();
  optimizer.begin_step();
  grad_scale_ = product(grad_scale, mean_.to_update());
  executor_.update(programs_.update(), [&](size_t unit) {
    const auto update = [&] {
      units_[unit]->wait_for_sum();
      optimizer.update(unit, grad_scale_);
    };
    return shared_.reduce.run_untimed(update, units_[unit]->updated());
  });
  end_update();
}

void DataParallel::swap_averages(optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  check_usable();
  check_not_evaluating("swap_averages");
  check_own(optimizer, "swap_averages");
  TRIREME_CHECK(!complete_,
                "[parallel.swap_averages] a gradient has not been applied yet; call step() first");
  take_writes();
  executor_.update(programs_.update(), [&](size_t unit) {
    return shared_.reduce.run_untimed([&] { optimizer.swap_average(unit); }, units_[unit]->updated());
  });
  unshard_held();
}

void DataParallel::end_update() {
  if (options_.hook.hook == Hook::kLocalSgd && ++steps_apart_ == options_.hook.local_steps)
    average_parameters();
  unshard_held();
}

/// A module does not announce that it uses a bucket: all must be whole before the next forward pass.
void DataParallel::unshard_held() {
  if (use_from_ != UseFrom::kBuckets && !executor_.holds()) return;
  for (const auto& unit : units_) unit->unshard();
}

void DataParallel::skip_step() {
  in_backward_ = complete_ = false;
  mean_.drop();
  end_backward_range();
  executor_.abandon();
  programs_.begin_step();
  for (const auto& unit : units_) unit->drop_gradients();
  completion_.forget();
  current_.clear();
}

void DataParallel::average_parameters() {
  if (options_.hook.hook != Hook::kLocalSgd) return;
  notice_update();
  for (const auto& unit : units_) unit->average_parameters();
  steps_apart_ = 0;
}

void DataParallel::check_together(const char* operation) const {
  if (steps_apart_ == 0 || mesh_.dp->size() == 1) return;
  throw LogicError(
      "[parallel.{}] rank {}: the ranks of local SGD have different weights, {} steps after the last "
      "averaging; call engine->average_parameters() on all of them first",
      operation, mesh_.world->rank(), steps_apart_);
}

DataParallel::Held::Held(DataParallel& engine, Whole form) : engine_(engine) {
  engine_.notice_update();
  engine_.take_writes();
  for (const auto& unit : engine_.units_) unit->unshard(form);
  engine_.executor_.hold(+1);
}

DataParallel::Held::~Held() {
  engine_.executor_.hold(-1);
  if (engine_.executor_.holds()) return;
  try {
    engine_.take_writes();
    for (const auto& unit : engine_.units_) unit->reshard();
  } catch (const std::exception& error) {
    log_warning("[parallel.held] rank {}: parameters could not be freed: {}", engine_.mesh_.world->rank(),
                error.what());
  }
}

}  // namespace trireme::parallel
