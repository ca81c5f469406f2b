#include "trireme/precision/loss_scaler.h"

#include <algorithm>

namespace trireme::precision {
namespace {

constexpr double kFactor = 2.0;
constexpr double kMaxScale = 0x1.0p24;  // beyond, the scaled loss itself leaves fp16 and then fp32

}  // namespace

LossScaler::LossScaler(const plan::LossScaleConfig& config, bool enabled)
    : config_(config),
      enabled_(enabled),
      scale_(enabled ? config.initial : 1.0),
      patience_(config.hysteresis) {}

void LossScaler::set_state(const State& state) {
  if (!enabled_) return;
  scale_ = state.scale;
  patience_ = state.patience;
  good_steps_ = state.good_steps;
  overflows_in_a_row_ = state.overflows_in_a_row;
  skipped_ = state.skipped;
}

void LossScaler::update(bool finite) {
  if (!enabled_) return;
  if (finite) {
    overflows_in_a_row_ = 0;
    if (++good_steps_ % config_.window != 0) return;
    scale_ = std::min(scale_ * kFactor, kMaxScale);
    patience_ = config_.hysteresis;
    return;
  }
  ++skipped_;
  ++overflows_in_a_row_;
  good_steps_ = 0;
  patience_ = std::max<int64_t>(patience_ - 1, 0);
  if (patience_ == 0) scale_ = std::max(scale_ / kFactor, config_.minimum);
}

}  // namespace trireme::precision
