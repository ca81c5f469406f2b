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
  return std::sqrt(sum_over_ranks(squares));
}

std::string DataParallel::nonfinite_parameter() const {
  for (const auto& unit : units_) {
    if (std::string name = unit->nonfinite_parameter(); !name.empty()) return name;
  }
  return {};
}

std::vector<optim::FlatParam> DataParallel::optimizer_params() const {
  std::vector<optim::FlatParam> params;
  for (const auto& unit : units_) params.push_back(unit->optimizer_param());
  return params;
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

void DataParallel::step(optim::Optimizer& optimizer, double lr, const optim::GradScale& grad_scale) {
  const at::NoGradGuard no_grad;
  const kernels::TraceRange range("update");
  check_usable();
  if (!std::exchange(complete_, false)) {
    throw LogicError(
        "[parallel.step] rank {}: there is no complete gradient since the last update, or the backward pass "
        "failed; call backward() with the last micro-batch before step()",
        mesh_.world->rank());
  }
  optimizer.begin_step();
  grad_scale_ = grad_scale;
  for (const size_t unit : update_order()) {
    FlatUnit& flat = *units_[unit];
    const auto update = [&] {
      flat.wait_for_sum();
      optimizer.update(unit, lr, grad_scale_);
    };
    flat.publish_update(shared_.reduce.run_untimed(update, flat.updated()));
  }
  if (options_.hook.hook == Hook::kLocalSgd && ++steps_ % options_.hook.local_steps == 0)
    average_parameters();
  // A module does not announce that it uses a bucket: all must be whole before the next forward pass.
  if (use_from_ == UseFrom::kBuckets) {
    for (const auto& unit : units_) unit->unshard();
  }
}

void DataParallel::skip_step() {
  in_backward_ = complete_ = false;
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
  for (const auto& unit : engine_.units_) unit->unshard();
  ++engine_.held_;
}

DataParallel::Held::~Held() {
  if (--engine_.held_ > 0) return;
  try {
    for (const auto& unit : engine_.units_) unit->reshard();
  } catch (const std::exception& error) {
    log_warning("[parallel.held] rank {}: parameters could not be freed: {}", engine_.mesh_.world->rank(),
                error.what());
  }
}

}  // namespace trireme::parallel
