#pragma once
// What a run reads, once it is ready: samples to train on, and others to validate on.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "trireme/base/classification.h"
#include "trireme/base/sink.h"
#include "trireme/data/batch.h"
#include "trireme/data/progress.h"
#include "trireme/data/tokenizer.h"
#include "trireme/plan/token_split.h"
#include "trireme/train/trainer.h"

namespace trireme::train {

/// Micro-batches of one data-parallel rank, one a call. Stops what prepares them when it is destroyed.
using Feed = std::function<data::Batch()>;

struct FeedOptions {
  int64_t global_batch = 0, micro_batch = 0;
  int64_t dp_rank = 0, dp_size = 1;
  plan::TokenSplit tokens = {};  ///< of each sequence, those that this rank along cp has
  int64_t first_step = 0;        ///< of the run; steps before it are left out
  /// Of images: a step that holds the last ones of an epoch goes on with the next epoch, instead of being
  /// short. Text always runs on.
  bool runs_on = false;
  bool pin_memory = false;
};

/// Whether steps of a new run go on over epochs: stages take micro-batches of one shape.
inline bool begins_running_on(const plan::Config& config) {
  return config.parallel.pp > 1;
}

/// Micro-batches to validate on, one a call, as many on every rank; `rows` of a batch count.
struct ValidationFeed {
  Feed next;
  int64_t batches = 0;  ///< of each rank
};

class RunData {
 public:
  virtual ~RunData() = default;
  RunData(const RunData&) = delete;
  RunData& operator=(const RunData&) = delete;

  /// "9,350 files, 36.2 MiB, byte tokens"
  virtual std::string description() const = 0;
  /// Tokens or images to train and to validate on: ranks that read the same have the same.
  struct Sizes {
    int64_t train = 0, val = 0;
    bool operator==(const Sizes&) const = default;
  };
  virtual Sizes sizes() const = 0;
  /// What is counted: "tokens" or "images".
  virtual std::string counted() const = 0;
  /// Whether a sample has one label, so that guesses can be counted.
  virtual bool has_labels() const { return false; }
  /// Throws ConfigError when the model cannot read it.
  virtual void check_fits(const plan::ModelConfig& model) const = 0;
  /// Training samples.
  virtual int64_t samples() const = 0;
  /// A hash of the training data: other data has another hash.
  virtual uint64_t digest() const = 0;
  /// The same of the held-out data; 0: there is none.
  virtual uint64_t held_out_digest() const { return 0; }
  /// That of text; none: samples are no text.
  virtual const data::Tokenizer* tokenizer() const { return nullptr; }

  // How epochs and steps fit: unless said otherwise, a step may hold the last samples of one epoch and the
  // first of the next. Of the options global_batch and runs_on count.

  /// Training samples that the first `steps` steps of a run see.
  virtual int64_t samples_in(int64_t steps, const FeedOptions& options) const {
    return steps * options.global_batch;
  }
  /// The first so many steps that hold all samples `epochs` times.
  virtual int64_t steps_for(int64_t epochs, const FeedOptions& options) const {
    return (epochs * samples() + options.global_batch - 1) / options.global_batch;
  }
  /// Micro-batches from the beginning of step options.first_step on.
  virtual Feed feed(const FeedOptions& options) const = 0;

  virtual int64_t val_samples() const = 0;
  /// Micro-batches of at most `most` held-out samples, each counted once; options.first_step is ignored.
  virtual ValidationFeed validation(int64_t most, const FeedOptions& options) const = 0;

  /// A part of the held-out samples that is validated for itself: its loss is loss/NAME.
  struct HeldOutSet {
    std::string name;
    double weight = 1.0;  ///< of its results in those of all, beside the weights of the others
  };
  /// Empty: all held-out samples are one set without a name.
  virtual std::vector<HeldOutSet> held_out_sets() const { return {}; }
  /// As validation(), of one of these sets.
  virtual ValidationFeed validation_of([[maybe_unused]] size_t set, int64_t most,
                                       const FeedOptions& options) const {
    return validation(most, options);
  }

  /// Where the first `samples` training samples of a run come from; empty: there is one source.
  virtual std::vector<SourceUse> sources_in([[maybe_unused]] int64_t samples) const { return {}; }

  // For people, about data with labels.

  virtual std::vector<std::string> classes() const { return {}; }  ///< names
  /// The name of a held-out sample: a file, or a place in one.
  virtual std::string held_out_name([[maybe_unused]] int64_t sample) const { return {}; }
  /// A held-out sample as models see it. Throws data::BrokenImage when its file cannot be read.
  virtual Picture held_out_picture([[maybe_unused]] int64_t sample) const { return {}; }
  /// Why there is nothing to validate on although the config asks for it, and what to do; empty: it does not.
  virtual std::string why_no_validation() const { return {}; }
  /// What a user should know of the data before it is trained on, such as files that are not read: sentences.
  virtual std::vector<std::string> notes() const { return {}; }

 protected:
  RunData() = default;
};

/// Prepares the data that run.config.data names, if necessary, and opens it. `on_progress` is called as
/// preparation makes headway; what it throws ends this. Throws ConfigError and DataError that name files,
/// EnvironmentError when disks fail.
std::shared_ptr<const RunData> open_run_data(const TrainOptions& run, const data::OnProgress& on_progress);

// One for each kind of data.
std::shared_ptr<const RunData> open_text(const TrainOptions& run, const data::OnProgress& on_progress);
std::shared_ptr<const RunData> open_mixture(const TrainOptions& run, const data::OnProgress& on_progress);
std::shared_ptr<const RunData> open_images(const TrainOptions& run, const data::OnProgress& on_progress);
std::shared_ptr<const RunData> open_program_data(const TrainOptions& run);

}  // namespace trireme::train
