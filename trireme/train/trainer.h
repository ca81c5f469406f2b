#pragma once
// The training loop: from a resolved config and a world to a trained model and its records.
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/sink.h"
#include "trireme/comm/world.h"
#include "trireme/plan/config.h"

namespace trireme::train {

struct TrainOptions {
  plan::Config config;         ///< complete and checked (plan::load)
  std::string cache_dir;       ///< for token shards
  std::string builtin_corpus;  ///< folder that data.path "builtin" stands for
  std::string weights_path;    ///< where rank 0 writes the final weights, if checkpoint.final_weights
  std::string trace_path;      ///< where rank 0 writes the trace of train.profile_steps
  std::vector<Sink*> sinks;    ///< called on rank 0 only
  const std::atomic<int>* stop_signal =
      nullptr;           ///< non-zero: finish what is enqueued, then end (any rank may set it)
  bool announce = true;  ///< rank 0 logs what is about to run
  /// Whether the next step is enqueued before the totals of this one are read; none: on a GPU. What is seen
  /// in totals, such as a stop signal, then takes effect a step later, on all ranks alike. Never where the
  /// loss is scaled dynamically: whether a step is applied is decided from its totals.
  std::optional<bool> run_ahead = {};
};

struct TrainResult {
  RunSummary summary;
  int stop_signal = 0;  ///< the signal that ended the run early, 0 for none; the same on every rank
};

/// Trains for config.train.steps steps. Collective over the world. Throws DataError, NumericsError (loss or
/// gradient not finite, naming the step), CommError, OutOfMemory.
TrainResult train(const TrainOptions& options, std::shared_ptr<comm::World> world);

}  // namespace trireme::train
