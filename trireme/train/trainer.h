#pragma once
// The training loop: from a resolved config and a world to a trained model and its records.
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/classification.h"
#include "trireme/base/sink.h"
#include "trireme/comm/world.h"
#include "trireme/plan/config.h"
#include "trireme/plan/pipeline_report.h"

namespace trireme::train {

struct Program;

struct TrainOptions {
  plan::Config config;            ///< complete and checked (plan::load)
  std::string cache_dir;          ///< for token shards
  std::string builtin_corpus;     ///< folder that data.path "builtin" stands for
  std::string weights_path;       ///< where rank 0 writes the final weights, if checkpoint.final_weights
  std::string best_weights_path;  ///< where it keeps those of the best validation, if checkpoint.best
  /// Where checkpoints go and are looked for, on a file system that all ranks see; rank 0's counts. Empty: no
  /// checkpoints.
  std::string checkpoint_dir;
  /// Go on from the newest checkpoint there that is whole, or begin where there is none.
  bool resume = false;
  /// Go on from this checkpoint instead; rank 0's counts.
  std::string resume_from;
  std::string trace_path;  ///< where rank 0 writes the trace of train.profile_steps
  /// In a pipeline: called on rank 0 with the report of one step, recorded on all ranks next to
  /// train.profile_steps.
  std::function<void(const plan::PipelineReport&)> show_pipeline = {};
  /// In a run on images: called at the end, on ranks that set it, with the classification of all images that
  /// were validated.
  std::function<void(const Classification&)> show_guesses = {};
  std::vector<Sink*> sinks;  ///< called on rank 0 only
  /// Non-zero on any rank: the run ends. Steps that are enqueued are finished and the weights written;
  /// nothing is validated any more, and no text is generated.
  const std::atomic<int>* stop_signal = nullptr;
  int64_t local_ranks = 1;  ///< of this host, which share its memory
  bool announce = true;     ///< rank 0 logs what is about to run
  /// Whether the next step is enqueued before the totals of this one are read; none: on a GPU. What totals
  /// tell, such as a stop signal, then takes effect a step later, on all ranks alike. Ignored where the loss
  /// is scaled dynamically: whether a step is applied is decided from its totals.
  std::optional<bool> run_ahead = {};
  /// Data, metrics and callbacks of a program of one's own; it must outlive the run. Null: none.
  const Program* program = nullptr;
};

struct TrainResult {
  RunSummary summary;
  int stop_signal = 0;     ///< the signal that ended the run early, 0 for none; the same on every rank
  bool resumable = false;  ///< such a run has a checkpoint to go on from
};

/// Trains for config.train.steps steps, writes the weights, and then validates and generates the sample.
/// Collective over the world. A sink that cannot record a step is warned about and asked again for the next:
/// a full disk under metrics does not cost the weights. Throws ConfigError on every rank when their configs
/// differ (same_config.h), DataError, NumericsError (loss or gradient not finite, naming the step),
/// CommError, OutOfMemory (also before anything begins, when memory cannot be enough), EnvironmentError when
/// weights or summary cannot be written: weights on rank 0, after the last step has been recorded, and
/// comm::FailedElsewhere on the others.
TrainResult train(const TrainOptions& options, std::shared_ptr<comm::World> world);

/// The run of train() between its steps, for whoever decides when the next one is made. All members are
/// collective over the world and throw as train() does; after that the run can only be destroyed.
class Run {
 public:
  /// Builds what the config asks for, and goes on from a checkpoint where the options say so.
  Run(const TrainOptions& options, std::shared_ptr<comm::World> world);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// Whether no further step is made: all are, or a signal or a validation has ended the run.
  bool is_over() const;
  /// Makes the next `count` steps, or fewer where the run is over before. The last of them may still be under
  /// way on a GPU; its record then comes with the next step.
  void step(int64_t count);
  /// Ends the run: weights, records, the summary. Once, when it is over.
  TrainResult finish();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme::train
