// What ends a step: the norm of its gradient, the update, or neither.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
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

double DataParallel::grad_norm() const {
  std::vector<double> squares;
  for (const auto& rank : comm::gather_scalars(*mesh_.dp, {local_grad_squares()})) squares.push_back(rank[0]);
  const double device = to_norm_.device.defined() ? to_norm_.device.item<double>() : 1.0;
  return std::sqrt(sum_over_ranks(squares)) * to_norm_.host * device;
}

double DataParallel::clip_grad_norm(double max_norm) {
  check_complete("clip_grad_norm");
  TRIREME_CHECK(max_norm > 0.0, "[parallel.clip_grad_norm] max_norm is {}; give a positive number", max_norm);
  const double norm = grad_norm(), factor = optim::clip_factor(norm, max_norm);
  to_norm_.host *= factor;
  if (!handed_out_) {
    to_update_.host *= factor;
  } else if (factor != 1.0) {
    for (const auto& unit : units_) unit->scale_piece_gradients(factor);
  }
  return norm;
}

/// The end of a step's last backward pass.
void DataParallel::complete_gradient() {
  settle_average();
  complete_ = true;
  if (!handed_out_) return;
  for (const auto& unit : units_) unit->show_piece_gradients(to_update_);
  to_update_ = {};
}

/// Each rank has divided by the number of ranks; the mean divides by the sum of all weights. A GPU's host
/// does not wait for it.
void DataParallel::settle_average() {
  to_update_ = to_norm_ = {};
  const double mine = std::exchange(weight_sum_, 0.0);
  if (options_.average == Average::kSum) return;
  const auto ranks = static_cast<double>(mesh_.dp->size());
  const at::Tensor own = at::full({1}, mine, at::TensorOptions().device(options_.device).dtype(at::kDouble));
  const at::Tensor weights = mesh_.dp->size() > 1 ? comm::gather_rows(*mesh_.dp, own).sum() : own.sum();
  if (options_.device.is_cpu()) {
    const double sum = weights.item<double>();
    TRIREME_CHECK(sum > 0.0, "[parallel.backward] all micro-batches of this step have the weight 0");
    to_update_.host = to_norm_.host = ranks / sum;
  } else {
    to_norm_.device = ranks / weights;
    to_update_.device = to_norm_.device.to(at::kFloat);
  }
}

std::string DataParallel::nonfinite_parameter() const {
  for (const auto& unit : units_) {
    if (std::string name = unit->nonfinite_parameter(); !name.empty()) return name;
  }
  return {};
}

/// Units in the order of the next forward pass. The unit that was reduced last comes later, since its sum is
/// still being gathered, behind about as many parameters as it has: gathering takes about as long as updating
/// them.
std::vector<size_t> DataParallel::update_order() const {
  std::vector<size_t> order = forward_order_;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (std::ranges::find(order, unit) == order.end()) order.push_back(unit);
  }
  const size_t last = reduce_order_.back();
  if (!beside_ || !units_[last]->gathers_sum()) return order;
  int64_t meanwhile = 0;
  for (auto place = std::ranges::find(order, last); place + 1 != order.end(); ++place) {
    if (meanwhile >= units_[last]->layout().numel()) break;
    meanwhile += units_[place[1]]->layout().numel();
    std::swap(place[0], place[1]);
  }
  return order;
}

void DataParallel::check_complete(const char* operation) const {
  check_usable();
  check_not_evaluating(operation);
  if (complete_) return;
  throw LogicError(
      "[parallel.{}] rank {}: there is no complete gradient since the last update, or the backward pass "
      "failed; call backward() for the last micro-batch first (accumulate() is for the others)",
      operation, mesh_.world->rank());
}

void DataParallel::step(optim::Optimizer& optimizer) {
  step_scaled(optimizer, {});
}

void DataParallel::step_scaled(optim::Optimizer& optimizer, const optim::GradScale& grad_scale) {
  const at::NoGradGuard no_grad;
  const kernels::TraceRange range("update");
  check_complete("step");
  TRIREME_CHECK(
      !handed_out_,
      "[parallel.step] the gradients went to optimizer_tensors(); step with the optimizer over them");
  follow_frozen(optimizer);
  complete_ = false;
  take_writes();
  optimizer.begin_step();
  grad_scale_ = product(grad_scale, to_update_);
  for (const size_t unit : update_order()) {
    FlatUnit& flat = *units_[unit];
    const auto update = [&] {
      flat.wait_for_sum();
      optimizer.update(unit, grad_scale_);
    };
    flat.publish_update(shared_.reduce.run_untimed(update, flat.updated()));
  }
  end_update();
}

void DataParallel::end_update() {
  if (options_.hook.hook == Hook::kLocalSgd && ++steps_ % options_.hook.local_steps == 0)
    average_parameters();
  // A module does not announce that it uses a bucket: all must be whole before the next forward pass.
  if (use_from_ != UseFrom::kBuckets && held_ == 0) return;
  for (const auto& unit : units_) unit->unshard();
}

void DataParallel::skip_step() {
  in_backward_ = complete_ = false;
  weight_sum_ = 0.0;
  end_backward_range();
  finish_reductions(0);
  for (const auto& unit : units_) unit->drop_gradients();
  for (size_t unit = 1; unit < units_.size() && held_ == 0; ++unit) units_[unit]->reshard();
  for (auto& params : used_) std::fill(params.begin(), params.end(), false);
  visits_.clear();
  tape_.clear();
  current_.reset();
}

void DataParallel::average_parameters() {
  if (options_.hook.hook != Hook::kLocalSgd) return;
  for (const auto& unit : units_) unit->average_parameters();
}

DataParallel::Held::Held(DataParallel& engine) : engine_(engine) {
  engine_.notice_update();
  engine_.take_writes();
  for (const auto& unit : engine_.units_) unit->unshard();
  ++engine_.held_;
}

DataParallel::Held::~Held() {
  if (--engine_.held_ > 0) return;
  try {
    engine_.take_writes();
    for (const auto& unit : engine_.units_) unit->reshard();
  } catch (const std::exception& error) {
    log_warning("[parallel.held] rank {}: parameters could not be freed: {}", engine_.mesh_.world->rank(),
                error.what());
  }
}

}  // namespace trireme::parallel
