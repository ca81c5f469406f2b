#pragma once
// The end of a run whose validations become no better (train.early_stop).
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>

#include "trireme/base/sink.h"
#include "trireme/plan/config.h"

namespace trireme::train {

/// Counts validations in a row that were no better than the best one so far. All ranks see the same
/// values, so they decide alike.
class EarlyStop {
 public:
  /// As train.early_stop and train.early_stop_min_delta say. `metric`: what is seen, of which higher values
  /// may be better.
  explicit EarlyStop(const plan::TrainConfig& config, std::string metric = "loss",
                     bool higher_is_better = false)
      : patience_(config.early_stop),
        min_delta_(config.early_stop_min_delta),
        metric_(std::move(metric)),
        higher_is_better_(higher_is_better) {}

  bool is_on() const { return patience_ > 0; }
  /// Takes the value of the validation after `step`. One that is not finite is no better than any.
  void see(int64_t step, double value);
  int64_t last_seen() const { return step_; }  ///< the step of the last validation; 0: there was none
  /// How the run ends; none: it goes on.
  std::optional<EarlyEnd> end() const;

  /// The state that a checkpoint keeps: the validations before the save, of which that of the same step is
  /// none.
  nlohmann::json state() const;
  /// Goes on from there, or anew where the state is of another metric. Throws DataError naming `path` where
  /// it is none of ours.
  void restore(const nlohmann::json& state, const std::string& path);

 private:
  int64_t patience_;
  double min_delta_;
  std::string metric_;
  bool higher_is_better_;
  std::optional<double> best_;
  int64_t best_step_ = 0, step_ = 0;
  int64_t no_better_ = 0;  ///< validations since the best one
};

}  // namespace trireme::train
