#pragma once
// What a training run is put together from, as its config says: data, and a model with its engines and
// optimizers.
#include <memory>
#include <string>

#include "trireme/comm/mesh.h"
#include "trireme/comm/world.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"
#include "trireme/train/early_stop.h"
#include "trireme/train/monitor.h"
#include "trireme/train/program.h"
#include "trireme/train/run_data.h"
#include "trireme/train/trained_model.h"
#include "trireme/train/trainer.h"

namespace trireme::train {

/// Whether passes may be recorded: train.cuda_graphs is not off, and nothing known speaks against it. Rank 0
/// warns where train.cuda_graphs=on cannot be honoured.
bool can_record(const plan::Config& config, const comm::World& world);

/// What the callbacks of a program have heard of validations, and said.
struct CallbackCourse {
  int64_t told_at = 0;          ///< the step of the last validation that they were told of; 0: none
  std::string end_reason = {};  ///< why one of them ended the run then; empty: none did
};

struct Parts {
  /// `options` must outlive this. Collective. Throws as train().
  Parts(const TrainOptions& options, std::shared_ptr<comm::World> world, bool records_passes);
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  /// Steps of this run go on over epochs, or do not (FeedOptions::runs_on); with epochs, it has as many steps
  /// as that makes, and a longer warm-up ends with them: who counts in epochs need not know how many steps
  /// some data makes. Before open_feed().
  void run_on(bool over_epochs);
  /// Training samples that the first `steps` steps see.
  int64_t samples_in(int64_t steps) const { return data->samples_in(steps, feed_options()); }
  /// Reads the training data from the step behind step `step` on.
  void open_feed(int64_t step);
  FeedOptions feed_options() const;
  /// Whether train.epochs counts, and an epoch is over with step `step`.
  bool epoch_ends_with(int64_t step) const;
  /// Whether validations may end the run: a run that goes on then has to know the last one.
  bool validations_count() const { return early_stop.is_on() || !program.callbacks.empty(); }
  /// Whether one after `step` would be new to who counts them.
  bool is_new_validation(int64_t step) const {
    return (early_stop.is_on() && early_stop.last_seen() < step) ||
           (!program.callbacks.empty() && callbacks.told_at < step);
  }

  bool is_root() const { return world->rank() == 0; }
  bool on_gpu() const { return world->device().is_cuda(); }

  const TrainOptions& options;
  plan::Config config;  ///< that of the options; with epochs, with the steps that they make
  std::shared_ptr<comm::World> world;
  comm::Mesh mesh;
  plan::BatchPlan batch;
  plan::ModelFacts facts;  ///< of the whole model
  plan::ModelFacts held;   ///< of what this rank has of it
  std::shared_ptr<const RunData> data;
  bool runs_on;            ///< as run_on() said
  bool validates;          ///< there is something to validate on, and the config asks for it
  const Program& program;  ///< an empty one where the options have none
  EarlyStop early_stop;
  BestValidation best;  ///< whose weights are kept, where checkpoint.best asks for it; part of checkpoints
  CallbackCourse callbacks = {};
  bool records_passes;  ///< as can_record() said
  std::unique_ptr<TrainedModel> model;
  std::string base_digest = {};  ///< of the weights under adapters; empty: there are none
  Feed next_batch;

 private:
  void warn_of_data() const;
  void check_early_stop() const;
  void check_sample() const;
};

/// Why two equal runs may end with different weights; empty when they cannot.
std::string why_bits_vary(const Parts& parts);

/// Log lines of rank 0 about what is about to run.
void announce(const Parts& parts);

}  // namespace trireme::train
