#include "trireme/data/loader.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::data {
namespace {

void check_options(const TokenSamples& dataset, const LoaderOptions& options) {
  if (dataset.size() == 0) {
    throw DataError(
        "[data.loader] there is no sample, since one sequence needs {} tokens; use a longer text, a smaller "
        "data.seq_len or another data.val_fraction",
        dataset.seq_len() + 1);
  }
  TRIREME_CHECK(options.order || (options.sampler.samples >= 1 && options.sampler.samples <= dataset.size()),
                "[data.loader] the sampler covers {} samples, but the dataset has {}",
                options.sampler.samples, dataset.size());
  TRIREME_CHECK(options.dp_rank >= 0 && options.dp_rank < options.dp_size,
                "[data.loader] dp_rank={} is outside dp_size={}", options.dp_rank, options.dp_size);
  TRIREME_CHECK(options.micro_batch >= 1 && options.global_batch >= 1 &&
                    options.global_batch % (options.dp_size * options.micro_batch) == 0,
                "[data.loader] global_batch={} is not a multiple of dp_size={} x micro_batch={}",
                options.global_batch, options.dp_size, options.micro_batch);
  TRIREME_CHECK(options.cursor >= 0 && options.cursor % options.global_batch == 0,
                "[data.loader] cursor={} is not a multiple of global_batch={}", options.cursor,
                options.global_batch);
  TRIREME_CHECK(options.prefetch >= 1, "[data.loader] prefetch={} must be at least 1", options.prefetch);
}

/// A device would read and write beside its tables, or its loss would be NaN.
void check_tokens(std::span<const int64_t> tokens, int64_t sample, int64_t vocab_size) {
  if (vocab_size == 0) return;
  const auto outside = [vocab_size](int64_t token) { return token < 0 || token >= vocab_size; };
  const auto found = std::ranges::find_if(tokens, outside);
  if (found == tokens.end()) return;
  throw DataError(
      "[data.loader] token {} at position {} of sample {} is outside the model's vocabulary of {}; train "
      "with model.vocab_size={} or more, or prepare the data with the model's tokenizer",
      *found, found - tokens.begin(), sample, vocab_size, *found + 1);
}

}  // namespace

Batch read_batch(const TokenSamples& dataset, std::span<const int64_t> samples, const LoaderOptions& options,
                 int64_t step_kept) {
  const auto length = static_cast<size_t>(dataset.seq_len());
  const auto tensor_options = at::TensorOptions().dtype(at::kLong).pinned_memory(options.pin_memory);
  const auto rows = static_cast<int64_t>(samples.size());
  Batch batch{.inputs = at::empty({rows, dataset.seq_len()}, tensor_options),
              .targets = at::empty({rows, dataset.seq_len()}, tensor_options),
              .rows = rows,
              .step_rows = options.global_batch,
              .step_kept = step_kept};
  std::vector<int64_t> tokens(length + 1);
  int64_t* input = batch.inputs.mutable_data_ptr<int64_t>();
  int64_t* target = batch.targets.mutable_data_ptr<int64_t>();
  for (const int64_t sample : samples) {
    dataset.read_targets(sample, tokens, {target, length});
    check_tokens(tokens, sample, options.vocab_size);
    input = std::copy(tokens.begin(), tokens.end() - 1, input);
    target += length;
    if (step_kept > 0) batch.kept += dataset.kept_targets(sample);
  }
  if (options.end_token)
    batch.documents = document_table(dataset, samples, batch.inputs, *options.end_token, options.pin_memory);
  return batch;
}

class Loader::Impl {
 public:
  Impl(std::shared_ptr<const TokenSamples> dataset, const LoaderOptions& options)
      : dataset_(std::move(dataset)),
        options_(options),
        thread_([this](const std::stop_token& stop) { run(stop); }) {}

  Batch next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !ready_.empty() || error_; });
    if (ready_.empty()) std::rethrow_exception(error_);
    Batch batch = std::move(ready_.front());
    ready_.pop_front();
    changed_.notify_all();
    return batch;
  }

 private:
  void run(const std::stop_token& stop) {
    try {
      const int64_t per_rank = options_.global_batch / options_.dp_size;
      for (int64_t cursor = options_.cursor; !stop.stop_requested(); cursor += options_.global_batch) {
        produce_step(stop, samples_at(cursor + options_.dp_rank * per_rank, per_rank), kept_in_step(cursor));
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
      changed_.notify_all();
    }
  }

  std::vector<int64_t> samples_at(int64_t begin, int64_t count) const {
    return options_.order ? options_.order(begin, count) : sample_indices(options_.sampler, begin, count);
  }

  /// Targets that count in the step at `cursor`, on all ranks: each of them has the same data. 0: all do.
  int64_t kept_in_step(int64_t cursor) const {
    if (!dataset_->ignores_targets()) return 0;
    int64_t kept = 0;
    for (const int64_t sample : samples_at(cursor, options_.global_batch))
      kept += dataset_->kept_targets(sample);
    return kept;
  }

  /// The micro-batches of one optimizer step.
  void produce_step(const std::stop_token& stop, std::span<const int64_t> samples, int64_t step_kept) {
    while (!samples.empty() && !stop.stop_requested()) {
      const auto count = static_cast<size_t>(options_.micro_batch);
      push(stop, read_batch(*dataset_, samples.first(count), options_, step_kept));
      samples = samples.subspan(count);
    }
  }

  void push(const std::stop_token& stop, Batch batch) {
    std::unique_lock lock(mutex_);
    const auto prefetch = static_cast<size_t>(options_.prefetch);
    if (!changed_.wait(lock, stop, [&] { return ready_.size() < prefetch; })) return;
    ready_.push_back(std::move(batch));
    changed_.notify_all();
  }

  const std::shared_ptr<const TokenSamples> dataset_;
  const LoaderOptions options_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Batch> ready_;
  std::exception_ptr error_;
  std::jthread thread_;  // last: stops and joins before what it uses goes
};

Loader::Loader(std::shared_ptr<const TokenSamples> dataset, const LoaderOptions& options) {
  check_options(*dataset, options);
  impl_ = std::make_unique<Impl>(std::move(dataset), options);
}

Loader::~Loader() = default;

Batch Loader::next() {
  return impl_->next();
}

}  // namespace trireme::data
