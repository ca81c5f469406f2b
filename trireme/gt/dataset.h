#pragma once
// Datasets of a program: its workers read the batches themselves, and the program names them by their
// numbers.
#include <cstdint>
#include <memory>

#include "trireme/gt/tensor.h"
#include "trireme/plan/dataset_spec.h"

namespace gt {

class Program;
using DatasetOptions = trireme::plan::DatasetSpec;

/// The tokens of a batch and their successors, each (batch, seq_len) int64. Where one is first used says on
/// which workers it lies, as for gt::tensor(): rows are split where the signal has axis 0, and on all of its
/// workers otherwise. Each worker reads the rows that it has; one without a use reads nothing.
struct TokenBatch {
  Tensor inputs, targets;
};

/// A handle; copies are the same dataset.
class Dataset {
 public:
  Dataset() = default;
  Dataset(std::weak_ptr<Program> program, int64_t number, DatasetOptions options)
      : program_(std::move(program)), number_(number), options_(std::move(options)) {}

  /// The batch of this number, from 0 on: sequences step * batch and those behind it in the order of the
  /// seed, which begins another epoch when all were read. Returns at once. Micro-batch m of M is batch(step *
  /// M + m) of a dataset whose `batch` is the rows of a micro-batch. In a gt::Capture the number is an
  /// argument of the replay. Throws trireme::ConfigError for numbers below 0, an empty handle, and workers
  /// that this thread does not have any more; workers throw what they find when they read (gt::dataset()).
  TokenBatch batch(int64_t step, source_location where = source_location::current()) const;

  const DatasetOptions& options() const { return options_; }

 private:
  std::weak_ptr<Program> program_;
  int64_t number_ = 0;
  DatasetOptions options_;
};

/// The dataset of these options on the workers of this thread's program; equal options are one dataset. Paths
/// that are not absolute begin in this process's folder, and each worker opens them on its own machine when
/// it needs the first of its rows: a text is made into tokens once a machine, as for `trireme train`. Returns
/// at once. Throws trireme::ConfigError for options that cannot be. What a worker finds wrong later ends the
/// session as any instruction that fails does, with the worker, the path, and the lines of the batch and of
/// the dataset: there is no such path, it has fewer tokens than a row, tokens beyond vocab_size, or other
/// tokens than another worker's.
Dataset dataset(const DatasetOptions& options, source_location where = source_location::current());

}  // namespace gt
