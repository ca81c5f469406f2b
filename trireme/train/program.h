#pragma once
// What a program of one's own brings into a run: data, metrics and callbacks (docs/guide/own_data.md).
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/sink.h"
#include "trireme/data/token_samples.h"
#include "trireme/plan/config.h"
#include "trireme/train/run_data.h"

namespace trireme::train {

/// A number that is measured beside the loss whenever a run validates: val_NAME in its records. It is made
/// from sums over all held-out rows, of which ranks have different ones.
struct Metric {
  std::string name;              ///< of a-z, 0-9 and _
  bool higher_is_better = true;  ///< for train.monitor
  int64_t sums = 2;              ///< numbers that add() returns
  /// What some rows add to the sums: logits (B, T, V) of the vocabulary and targets (B, T) int64, which are
  /// data::kIgnoredTarget where they do not count; of images (B, classes) and (B). Both are on the device of
  /// the model.
  std::function<std::vector<double>(const at::Tensor& logits, const at::Tensor& targets)> add;
  /// The metric from the sums; empty: the first divided by the second.
  std::function<double(const std::vector<double>& sums)> value = {};
};

/// Functions that are called in the course of a run. All functions are called on every rank, in the same
/// order; losses and metrics of a record are the same on all ranks, times and memory are not.
class Callback {
 public:
  virtual ~Callback() = default;
  /// After every step, before it is saved and validated.
  virtual void on_step(const StepRecord&) {}
  /// After the validation of a step, with its results. A reason ends the run as train.early_stop does; it
  /// suffices that one rank has one.
  virtual std::optional<std::string> on_validation(const StepRecord&) { return std::nullopt; }
  /// All that it remembers, which checkpoints keep: rank 0's counts.
  virtual std::string state() const { return {}; }
  /// Goes on from there. A run that goes on calls nothing again that came before its checkpoint.
  virtual void restore(const std::string&) {}
};

struct Program {
  /// Opens the data that data.path=program stands for, on every rank, and on a thread of its own, within
  /// comm.timeout_s. It throws what open_run_data() throws. Empty: the program has no data.
  std::function<std::shared_ptr<const RunData>(const plan::Config& config)> open_data = {};
  std::vector<Metric> metrics = {};
  std::vector<std::shared_ptr<Callback>> callbacks = {};
};

/// Data of sequences of tokens.
struct OwnTokens {
  std::shared_ptr<const data::TokenSamples> train;
  std::shared_ptr<const data::TokenSamples> held_out = {};  ///< null: there is nothing to validate on
  int64_t vocab_size = 0;                                   ///< tokens are below it
  std::string description = "data of the program";          ///< for the first lines of a run
};

/// That data in the order that text has: shuffled by the seed anew in each epoch, the same on any number of
/// ranks, and gone on with exactly. Sources of a held-out data::Mixture are validated for themselves. Throws
/// ConfigError where samples are not of data.seq_len tokens, or there are none. What it reads later throws
/// DataError for tokens outside the vocabulary, and for an order() of other samples than there are.
std::shared_ptr<const RunData> make_run_data(const plan::Config& config, OwnTokens tokens);

/// Throws ConfigError where names of metrics are not as they must be, or this config cannot measure them.
void check_program(const Program& program, const plan::Config& config);

/// The metric from its sums.
double value_of(const Metric& metric, const std::vector<double>& sums);

}  // namespace trireme::train
