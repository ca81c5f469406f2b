#pragma once
// Batches for one data-parallel rank, prepared by a background thread a few steps ahead.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "trireme/data/batch.h"
#include "trireme/data/sampler.h"
#include "trireme/data/token_samples.h"

namespace trireme::data {

struct LoaderOptions {
  SamplerOptions sampler = {};
  /// The samples that stand at positions [begin, begin + count), instead of what `sampler` says; empty: that.
  std::function<std::vector<int64_t>(int64_t begin, int64_t count)> order = {};
  int64_t global_batch = 0;
  int64_t micro_batch = 0;
  int64_t dp_rank = 0;
  int64_t dp_size = 1;
  int64_t cursor = 0;    ///< global position of the first sample; a multiple of global_batch
  int64_t prefetch = 4;  ///< micro-batches held ready
  bool pin_memory = false;
  /// The last token of each document, of which batches then have a table; none: they have none.
  std::optional<int64_t> end_token = {};
  int64_t vocab_size = 0;  ///< next() throws DataError for a token at or above it; 0: no check
};

/// Inputs and targets of these samples, one a row, as a loader's batches have them: (rows, seq_len) int64 on
/// the CPU, each contiguous, with `options.pin_memory`, `end_token` and `vocab_size`. `step_kept`: the
/// targets that count in the step on all ranks; 0: all do. Throws DataError for damaged data and for tokens
/// outside the vocabulary.
Batch read_batch(const TokenSamples& dataset, std::span<const int64_t> samples, const LoaderOptions& options,
                 int64_t step_kept = 0);

/// Yields global_batch / dp_size / micro_batch micro-batches per step, for ever.
class Loader {
 public:
  /// Starts the background thread. Throws DataError when there is no sample, and LogicError for options that
  /// do not fit each other or the samples.
  Loader(std::shared_ptr<const TokenSamples> dataset, const LoaderOptions& options);
  /// Stops the thread and waits for it.
  ~Loader();
  /// The next micro-batch of this rank: inputs and targets (micro_batch, seq_len) int64 on the CPU, pinned
  /// with pin_memory. Waits until the thread has one ready. Rethrows an error of the thread, such as
  /// DataError for damaged data or a token outside the vocabulary, when the batches that it completed before
  /// have been taken, and in every call after that. For one thread at a time.
  Batch next();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme::data
