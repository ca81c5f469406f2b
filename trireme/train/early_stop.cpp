#include "trireme/train/early_stop.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/checkpoint/strict_json.h"

namespace trireme::train {

void EarlyStop::see(int64_t step, double value) {
  step_ = step;
  const auto better = [this, value] {
    return higher_is_better_ ? value > *best_ + min_delta_ : value < *best_ - min_delta_;
  };
  if (std::isfinite(value) && (!best_ || better())) {
    best_ = value;
    best_step_ = step;
    no_better_ = 0;
  } else {
    ++no_better_;
  }
}

std::optional<EarlyEnd> EarlyStop::end() const {
  if (!is_on() || no_better_ < patience_) return std::nullopt;
  return EarlyEnd{.step = step_,
                  .best_step = best_step_,
                  .best_value = best_,
                  .validations = no_better_,
                  .metric = metric_,
                  .higher_is_better = higher_is_better_};
}

nlohmann::json EarlyStop::state() const {
  return {{"metric", metric_},
          {"higher_is_better", higher_is_better_},
          {"best", best_ ? nlohmann::json(*best_) : nlohmann::json()},
          {"best_step", best_step_},
          {"step", step_},
          {"no_better", no_better_}};
}

void EarlyStop::restore(const nlohmann::json& state, const std::string& path) {
  // A checkpoint of an old version knows the loss alone.
  const bool is_old = !state.contains("metric");
  if ((is_old ? "loss" : checkpoint::text_of(state, "metric", path)) != metric_) return;
  if (const auto higher = state.find("higher_is_better");
      higher != state.end() && *higher != higher_is_better_)
    return;
  const nlohmann::json& best = checkpoint::value_of(state, "best", path);
  if (!best.is_null() && !best.is_number()) checkpoint::fail_json(path, "'best' of early_stop is no number");
  best_ = best.is_null() ? std::nullopt : std::optional(best.get<double>());
  best_step_ = checkpoint::count_of(state, "best_step", path);
  step_ = checkpoint::count_of(state, "step", path);
  no_better_ = checkpoint::count_of(state, "no_better", path);
}

}  // namespace trireme::train
