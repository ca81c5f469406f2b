#include "trireme/parallel/gradient_mean.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::parallel {
namespace {

/// Weights outside of these bounds would take gradients beyond the range of fp32, or below it.
constexpr double kLeastWeight = 1e-20, kMostWeight = 1e20;

bool rounds(at::ScalarType loss) {
  return loss == at::kHalf || loss == at::kBFloat16;
}

}  // namespace

double GradientMean::factor_of(double weight, at::ScalarType loss) const {
  const double factor = average_ == Average::kMean ? weight / static_cast<double>(ranks_.size()) : weight;
  return rounds(loss) ? at::scalar_tensor(factor, loss).item<double>() : factor;
}

void GradientMean::check(double weight, at::ScalarType loss) const {
  TRIREME_CHECK(weight >= 0.0 && std::isfinite(weight),
                "[parallel.backward] rank {}: a micro-batch has the weight {}, which must be finite and at "
                "least 0; pass its number of rows or tokens, or leave it out",
                ranks_.ranks()[static_cast<size_t>(ranks_.rank())], number_text(weight));
  const double factor = factor_of(weight, loss);
  const bool in_bounds = weight == 0.0 || (weight >= kLeastWeight && weight <= kMostWeight);
  TRIREME_CHECK(
      in_bounds && std::isfinite(factor) && (factor > 0.0) == (weight > 0.0),
      "[parallel.backward] rank {}: a micro-batch has the weight {}, which is out of range for "
      "gradients of a loss in {}; multiply all weights by one number that brings them near 1, since "
      "only their ratios count in a mean",
      ranks_.ranks()[static_cast<size_t>(ranks_.rank())], weight, c10::toString(loss));
}

double GradientMean::add(double weight, at::ScalarType loss) {
  const double factor = factor_of(weight, loss);
  weight_sum_ += rounds(loss) ? factor * static_cast<double>(ranks_.size()) : weight;
  return factor;
}

at::Tensor GradientMean::settle(const at::Tensor& note) {
  to_update_ = to_norm_ = {};
  const double mine = std::exchange(weight_sum_, 0.0);
  if (average_ == Average::kSum) return {};
  const auto ranks = static_cast<double>(ranks_.size());
  const at::TensorOptions fp64 = at::TensorOptions().device(device_).dtype(at::kDouble);
  at::Tensor weights = at::full({1}, mine, fp64), notes;
  if (exchanges()) {
    const at::Tensor rows = comm::gather_rows(ranks_, at::cat({weights, note}));
    weights = rows.select(1, 0).contiguous();
    notes = rows.narrow(1, 1, note.numel()).contiguous();
  }
  weights = weights.sum();
  if (device_.is_cpu()) {
    const double sum = weights.item<double>();
    TRIREME_CHECK(sum > 0.0,
                  "[parallel.backward] all micro-batches of this step have the weight 0; give at least one a "
                  "weight above 0");
    to_update_.host = to_norm_.host = ranks / sum;
  } else {
    to_norm_.device = at::where(weights > 0.0, ranks / weights, 0.0);
    to_update_.device = to_norm_.device.to(at::kFloat);
  }
  return notes;
}

optim::GradScale GradientMean::take_before_sum() {
  to_norm_ = {};
  return std::exchange(to_update_, {});
}

double GradientMean::to_norm() const {
  return to_norm_.host * (to_norm_.device.defined() ? to_norm_.device.item<double>() : 1.0);
}

void GradientMean::scale(double factor, bool applied) {
  to_norm_.host *= factor;
  if (!applied) to_update_.host *= factor;
}

void GradientMean::set_state(const State& state) {
  weight_sum_ = state.weight_sum;
  to_update_ = state.to_update;
  to_norm_ = state.to_norm;
}

void multiply(const at::Tensor& gradient, const optim::GradScale& factor) {
  if (factor.host != 1.0) gradient.mul_(factor.host);
  if (factor.device.defined()) gradient.mul_(factor.device);
}

}  // namespace trireme::parallel
