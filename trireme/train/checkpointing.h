#pragma once
// A training run's checkpoints: each rank copies its part of the state (state_copy.h), and a thread writes
// the copy while training goes on, or writes the state itself while training waits (plan/saved_copy.h).
// Resuming reads the same names, whatever ranks and policy wrote them.
#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "trireme/base/sink.h"
#include "trireme/checkpoint/shard.h"
#include "trireme/checkpoint/store.h"
#include "trireme/precision/loss_scaler.h"
#include "trireme/train/parts.h"
#include "trireme/train/state_copy.h"

namespace trireme::train {

class SavedRun;

class Checkpointing {
 public:
  /// All arguments must outlive this. With checkpoint.every rank 0 takes the folder's lock. Collective.
  /// Throws EnvironmentError on all ranks when the folder cannot be used, or another run writes to it.
  Checkpointing(const TrainOptions& options, Parts& parts, precision::LossScaler& scaler);
  /// Waits for the thread, and for the parts of other ranks as finish() does unless give_up() was called; a
  /// save that does not come to its end is a warning.
  ~Checkpointing();
  Checkpointing(const Checkpointing&) = delete;
  Checkpointing& operator=(const Checkpointing&) = delete;

  /// What a run goes on from.
  struct Resumed {
    int64_t step = 0;  ///< 0: from the beginning
    double loss = 0.0;
    /// The record of that step, without what is measured after the save; none: the checkpoint is of an old
    /// version.
    std::optional<StepRecord> record = {};
  };
  /// Restores model, optimizer, loader, loss scale and random numbers from the checkpoint that the options
  /// ask for, or else from the newest that can be read whole, with a warning for each that cannot.
  /// Collective. Throws ConfigError that names keys when the checkpoint belongs to another config, DataError
  /// when none can be read.
  Resumed resume();
  /// Nothing refuses the run any more, so it takes the folder over: what was gone back from is set aside
  /// before the first step. Collective. Throws EnvironmentError on all ranks when the disk fails.
  void take_over();

  bool enabled() const { return config_.checkpoint.every > 0 && !folder_.empty(); }
  bool is_due(int64_t step) const { return enabled() && step % config_.checkpoint.every == 0; }
  /// Whether what ranks hold after the step is one state; ranks of local SGD differ between averages.
  bool can_save(int64_t step) const;
  /// Saves the state after the step, and the step's record: a run that is killed before it has published the
  /// record can do so when it goes on. Returns the milliseconds that training has waited; none when the save
  /// before is still being written, or this one cannot begin. A save that fails is a warning: training goes
  /// on. `last`: the save is not skipped, and is on the disk when this returns. A checkpoint that is on the
  /// disk is read back before older ones are removed, while training goes on. Collective.
  std::optional<double> save(const StepRecord& record, bool last);
  /// To be called before anything changes parameters or the optimizer's state: the current stream goes on
  /// when the state that is being saved has been copied.
  void before_update() {
    if (copy_) copy_->follow();
  }

  /// Waits until the save under way is on the disk, or known to have failed. Collective.
  void finish();

  /// Bytes of host memory that this rank's copy of the state takes; 0: there is no copy.
  int64_t copy_bytes() const { return copy_ ? copy_->bytes() : 0; }
  int64_t written() const { return written_; }  ///< rank 0 knows
  int64_t late() const { return late_; }
  int64_t failed() const { return failed_; }
  /// Whether a checkpoint has been written since the run began or went on, the same on all ranks; after
  /// finish(). Collective.
  bool has_written() const;
  /// A peer is lost: the save under way, if there is one, does not wait for the parts of others.
  void give_up() { given_up_ = true; }

 private:
  struct Outcome;

  void agree_on_folder();
  bool uses_folder() const { return (config_.checkpoint.every > 0 || resumes_) && !folder_.empty(); }
  void set_aside_later_ones();
  Resumed resume_from(const std::string& path);
  Resumed restore(const SavedRun& run, const std::string& path);
  std::string choose(const std::string& older_than);
  bool settle(bool busy);
  bool begin_folder(const std::string& temporary);
  checkpoint::ShardSpec snapshot(int64_t step);
  void write(const checkpoint::ShardSpec& spec, const std::string& temporary, const std::string& state);
  void fail(const std::string& temporary, const std::string& reason);
  void prune();
  void join();
  double patience_end() const;

  const TrainOptions& options_;
  const plan::Config& config_;
  Parts& parts_;
  precision::LossScaler& scaler_;
  std::string folder_;  ///< of the run's checkpoints
  std::string wanted_;  ///< the one to resume from, if it was named
  bool resumes_ = false;
  std::optional<checkpoint::Claim> claim_;    ///< rank 0's, until take_over()
  std::unique_ptr<checkpoint::Store> store_;  ///< rank 0's from then on, when checkpoints are written
  int64_t generation_ = 0;
  int64_t attempt_ = 0;

  std::optional<StateCopy> copy_;   ///< none: pieces are written as they are
  std::vector<at::Tensor> pieces_;  ///< of the save under way: this rank's, in the state or in the copy
  std::string temporary_;           ///< folder of the save under way, or of the last
  std::thread writer_;
  std::atomic<bool> writing_{false}, given_up_{false};
  std::atomic<bool> pruning_{false};  ///< from a save on, until the thread has removed what is older
  /// When reading back for prune() ends without a result, because this thread waits and other ranks for it.
  std::atomic<double> read_until_{std::numeric_limits<double>::infinity()};
  std::string error_;       ///< of the last save, from its thread; empty: none
  bool unsettled_ = false;  ///< a save has begun whose outcome ranks have not compared
  int64_t written_ = 0, late_ = 0, failed_ = 0;
};

}  // namespace trireme::train
