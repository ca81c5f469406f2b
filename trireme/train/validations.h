#pragma once
// The validations in the course of a run: on the averages of the parameters where they are kept, with the
// best weights so far put aside, and at the end of a run on images what the model guesses.
#include <cstdint>
#include <optional>

#include "trireme/base/sink.h"
#include "trireme/train/agenda.h"
#include "trireme/train/best_weights.h"
#include "trireme/train/checkpointing.h"
#include "trireme/train/guesses.h"
#include "trireme/train/parts.h"

namespace trireme::train {

class Validations {
 public:
  /// Of a run that goes on after step `resumed_at`; 0: it begins. All must outlive this. Collective.
  Validations(Parts& parts, Checkpointing& checkpoints, Agenda& agenda, int64_t resumed_at);

  /// Validates after the step of `record`, which stays without results when a signal comes meanwhile: the
  /// agenda hears of it, and of the loss that ends the run (train.early_stop). Collective.
  void validate(StepRecord& record);

  /// Of a run that goes on after the step of `record`, whose save was made before the validation that
  /// followed it: that one is made again where train.early_stop or a callback counts it. Collective.
  void catch_up(StepRecord record);

  /// None: the run keeps no best weights.
  const std::optional<BestWeights>& best() const { return best_; }
  /// How they ended the run; none: they did not.
  std::optional<EarlyEnd> end() const;

 private:
  std::optional<Validation> measure(int64_t step, Guesses* guesses);
  void watch(const StepRecord& record, const Validation& found);
  void tell_callbacks(const StepRecord& record);
  void end_if_due(int64_t step);
  void show(const Guesses& guesses, int64_t step) const;

  Parts& parts_;
  const plan::Config& config_;
  Checkpointing& checkpoints_;
  Agenda& agenda_;
  std::optional<BestWeights> best_;
  Monitor monitor_;  ///< of early stopping
};

}  // namespace trireme::train
