#pragma once
// What a run continues with beside its tensors: config, step, record, data, loss scale, validations that were
// no better, history of FP8 scales and random numbers, as JSON in a checkpoint.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "trireme/precision/loss_scaler.h"
#include "trireme/train/parts.h"

namespace trireme::train {

/// Of the whole run, after the step of `record`: what rank 0 writes.
std::string run_state(const Parts& parts, const precision::LossScaler& scaler, const StepRecord& record);
/// Of this rank: the random generator of dropout, from which nothing else of a run draws; empty without
/// dropout.
std::string rank_state(const Parts& parts);

/// What a checkpoint says of its run. Functions throw DataError where it is damaged.
class SavedRun {
 public:
  /// `state` is the checkpoint's, with the parts of all ranks; `path` is for messages.
  SavedRun(const std::string& state, std::string path);

  /// Throws ConfigError where this run cannot make the steps that follow: its model, data, batch or optimizer
  /// are others.
  void check(const Parts& parts) const;
  /// Steps go on over epochs, or do not, as those before. Throws ConfigError where stages cannot, and where
  /// the run ends before.
  void keep_steps(Parts& parts) const;
  int64_t step() const;
  double loss() const;  ///< 0: it is not known
  /// Of that step, without what is measured after the save; none: the checkpoint is of an old version.
  std::optional<StepRecord> record() const;
  /// Loss scale, random numbers and FP8 history, as far as this run has any and continues with them.
  void restore(Parts& parts, precision::LossScaler& scaler) const;

 private:
  const nlohmann::json& run() const;
  bool ran_on() const;

  nlohmann::json document_;
  std::string path_;
};

}  // namespace trireme::train
