#pragma once
// Dynamic loss scaling for fp16 (Micikevicius et al. 2018), with the hysteresis of Megatron and DeepSpeed.
// Ranks agree on whether a step's gradients are finite before they call update(), so all hold the same scale
// without communication.
#include <cstdint>

#include "trireme/plan/config.h"

namespace trireme::precision {

class LossScaler {
 public:
  /// `enabled` false: the scale stays 1.
  LossScaler(const plan::LossScaleConfig& config, bool enabled);

  bool enabled() const { return enabled_; }
  /// The factor that multiplies the loss of the next step and divides its gradients.
  double scale() const { return scale_; }
  /// Steps in a row whose gradients were not finite.
  int64_t overflows_in_a_row() const { return overflows_in_a_row_; }
  /// All steps so far whose gradients were not finite.
  int64_t skipped() const { return skipped_; }

  /// The state with which a resumed run goes on.
  struct State {
    double scale = 1.0;
    int64_t patience = 0, good_steps = 0, overflows_in_a_row = 0, skipped = 0;
  };
  /// To be saved between two steps.
  State state() const { return {scale_, patience_, good_steps_, overflows_in_a_row_, skipped_}; }
  /// Goes on from `state`; nothing where the scaler is not enabled. Every rank sets the same state.
  void set_state(const State& state);

  /// To be called once a step, with whether its gradients were finite; if not, the caller skips the update.
  /// The `hysteresis`-th overflow and each one after it halve the scale. `window` finite steps in a row
  /// double it and start the count of overflows anew.
  void update(bool finite);

 private:
  plan::LossScaleConfig config_;
  bool enabled_;
  double scale_;
  int64_t patience_;  ///< steps that may still overflow before the scale falls
  int64_t good_steps_ = 0, overflows_in_a_row_ = 0, skipped_ = 0;
};

}  // namespace trireme::precision
