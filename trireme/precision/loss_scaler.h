#pragma once
// Dynamic loss scaling for fp16 (Micikevicius et al. 2018), with the hysteresis of Megatron and DeepSpeed. It
// is fed with what all ranks have agreed on, so every rank holds the same scale without talking about it.
#include <cstdint>

#include "trireme/plan/config.h"

namespace trireme::precision {

class LossScaler {
 public:
  /// `enabled` false: the scale is 1 for good.
  LossScaler(const plan::LossScaleConfig& config, bool enabled);

  bool enabled() const { return enabled_; }
  /// What the loss of the next step is multiplied by, and its gradients divided by.
  double scale() const { return scale_; }
  /// Steps in a row whose gradients were not finite.
  int64_t overflows_in_a_row() const { return overflows_in_a_row_; }
  int64_t skipped() const { return skipped_; }

  /// After a step whose gradients were finite, or not; the latter must not be applied. Gradients that are not
  /// finite halve the scale once `hysteresis` of them have come; `window` finite ones in a row double it and
  /// forgive the former.
  void update(bool finite);

 private:
  plan::LossScaleConfig config_;
  bool enabled_;
  double scale_;
  int64_t patience_;  ///< steps that may still overflow before the scale falls
  int64_t good_steps_ = 0, overflows_in_a_row_ = 0, skipped_ = 0;
};

}  // namespace trireme::precision
