// Text as a run reads it: token shards in the cache.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/cores.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/data/corpus.h"
#include "trireme/data/dataset.h"
#include "trireme/data/loader.h"
#include "trireme/nn/context.h"
#include "trireme/train/run_data.h"

namespace trireme::train {
namespace {

/// Samples [first, first + count).
data::Batch read_samples(const data::Dataset& dataset, int64_t first, int64_t count) {
  const int64_t length = dataset.seq_len(), width = length + 1;
  at::Tensor tokens = at::empty({count, width}, at::kLong), targets = at::empty({count, length}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    dataset.read(first + i, {tokens.data_ptr<int64_t>() + i * width, static_cast<size_t>(width)},
                 {targets.data_ptr<int64_t>() + i * length, static_cast<size_t>(length)});
  }
  return {.inputs = tokens.narrow(1, 0, length), .targets = targets};
}

/// Samples that a data-parallel rank validates on.
struct Part {
  int64_t begin, end;
  int64_t rows(int64_t done, int64_t at_once) const {
    return std::clamp<int64_t>(end - begin - done, 0, at_once);
  }
};

class TextData : public RunData {
 public:
  TextData(const plan::Config& config, data::PreparedCorpus corpus)
      : config_(config),
        corpus_(std::move(corpus)),
        train_(std::make_shared<data::Dataset>(corpus_.folder, "train", config.data.seq_len)) {
    if (corpus_.val_tokens > config.data.seq_len)
      val_ = std::make_shared<data::Dataset>(corpus_.folder, "val", config.data.seq_len);
  }

  std::string description() const override { return corpus_.description; }
  Sizes sizes() const override { return {corpus_.train_tokens, corpus_.val_tokens}; }
  std::string counted() const override { return "tokens"; }
  void check_fits(const plan::ModelConfig& model) const override;
  int64_t samples() const override { return train_->size(); }
  uint64_t digest() const override { return train_->digest(); }
  uint64_t held_out_digest() const override { return val_ ? val_->digest() : 0; }
  const data::Tokenizer* tokenizer() const override { return corpus_.tokenizer.get(); }
  Feed feed(const FeedOptions& options) const override;
  int64_t val_samples() const override { return val_ ? val_->size() : 0; }
  ValidationFeed validation(int64_t most, const FeedOptions& options) const override;
  std::string why_no_validation() const override;
  std::vector<std::string> notes() const override {
    return corpus_.note.empty() ? std::vector<std::string>() : std::vector{corpus_.note};
  }

 private:
  std::string longer_validation() const;

  plan::Config config_;
  data::PreparedCorpus corpus_;
  std::shared_ptr<data::Dataset> train_, val_;  ///< no val_: too few tokens are held out
};

void TextData::check_fits(const plan::ModelConfig& model) const {
  if (corpus_.vocab_size <= model.vocab_size) return;
  throw ConfigError(
      "[train.data] the tokens of {} ({}) go up to {}, but model.vocab_size={}; set model.vocab_size to at "
      "least {}, or choose another data.tokenizer",
      config_.data.path, corpus_.folder, corpus_.vocab_size - 1, model.vocab_size, corpus_.vocab_size);
}

namespace {

/// Sequences in which this rank has some tokens; their rows count for each of the ranks that do.
data::Batch tokens_of_rank(data::Batch batch, const FeedOptions& options) {
  if (options.tokens.ranks == 1) return batch;
  for (at::Tensor* tokens : {&batch.inputs, &batch.targets}) {
    const bool pinned = tokens->is_pinned();
    *tokens = nn::tokens_of(*tokens, options.tokens).contiguous();
    if (pinned) *tokens = tokens->pin_memory();
  }
  batch.step_rows *= options.tokens.ranks;
  if (batch.step_kept > 0)
    batch.kept = batch.rows == 0 ? 0 : batch.targets.ne(data::kIgnoredTarget).sum().item<int64_t>();
  return batch;
}

}  // namespace

Feed TextData::feed(const FeedOptions& options) const {
  const auto loader = std::make_shared<data::Loader>(
      train_,
      data::LoaderOptions{.sampler = {.samples = train_->size(), .seed = static_cast<uint64_t>(config_.seed)},
                          .global_batch = options.global_batch,
                          .micro_batch = options.micro_batch,
                          .dp_rank = options.dp_rank,
                          .dp_size = options.dp_size,
                          .cursor = options.first_step * options.global_batch,
                          .pin_memory = options.pin_memory,
                          .vocab_size = config_.model.vocab_size});
  return [loader, options] { return tokens_of_rank(loader->next(), options); };
}

namespace {

/// Targets that count in samples [begin, end); 0 where all do.
int64_t kept_between(const data::Dataset& dataset, int64_t begin, int64_t end) {
  int64_t kept = 0;
  for (int64_t sample = begin; dataset.ignores_targets() && sample < end; ++sample)
    kept += dataset.kept_targets(sample);
  return kept;
}

}  // namespace

/// Data-parallel ranks take contiguous parts, and a rank that runs out joins the others with no rows.
ValidationFeed TextData::validation(int64_t most, const FeedOptions& options) const {
  const int64_t ranks = options.dp_size, total = std::min(most, val_->size()), at_once = options.micro_batch;
  const auto part_of = [=](int64_t rank) { return Part{total * rank / ranks, total * (rank + 1) / ranks}; };
  const int64_t largest_part = (total + ranks - 1) / ranks;
  const auto done = std::make_shared<int64_t>(0);
  const auto next = [=, val = val_, mine = part_of(options.dp_rank)] {
    const int64_t rows = mine.rows(*done, at_once);
    data::Batch batch = read_samples(*val, rows > 0 ? mine.begin + *done : 0, std::max<int64_t>(1, rows));
    batch.rows = rows;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const Part part = part_of(rank);
      const int64_t first = part.begin + *done, count = part.rows(*done, at_once);
      batch.step_rows += count;
      batch.step_kept += kept_between(*val, first, first + count);
    }
    if (rows > 0) batch.kept = kept_between(*val, mine.begin + *done, mine.begin + *done + rows);
    *done += at_once;
    return tokens_of_rank(std::move(batch), options);
  };
  return {.next = next, .batches = (largest_part + at_once - 1) / at_once};
}

/// Advice on how validation gets at least one sequence.
std::string TextData::longer_validation() const {
  const auto text = static_cast<double>(corpus_.train_tokens + corpus_.val_tokens);
  const double share = std::ceil(120.0 * static_cast<double>(config_.data.seq_len + 1) / text) / 100.0;
  constexpr double kMost = 0.5;  // of data.val_fraction
  if (share > kMost) return "use a longer text or a smaller data.seq_len";
  return fmt::format("raise it to {}", share);
}

std::string TextData::why_no_validation() const {
  if (val_ || config_.data.val_fraction == 0.0) return {};
  return fmt::format(
      "data.val_fraction={} of {} tokens holds out {}, but one sequence needs {}; {}, or set "
      "train.val_batches=0",
      config_.data.val_fraction, corpus_.train_tokens + corpus_.val_tokens, corpus_.val_tokens,
      config_.data.seq_len + 1, longer_validation());
}

}  // namespace

std::shared_ptr<const RunData> open_text(const TrainOptions& run, const data::OnProgress& on_progress) {
  const plan::DataConfig& config = run.config.data;
  return std::make_shared<TextData>(
      run.config, data::prepare_corpus({.path = config.path,
                                        .builtin_root = run.builtin_corpus,
                                        .tokenizer = config.tokenizer,
                                        .format = config.format,
                                        .loss_on = config.loss_on,
                                        .chat_template = config.chat_template,
                                        .val_fraction = config.val_fraction,
                                        .cache_dir = run.cache_dir,
                                        .seq_len = config.seq_len,
                                        .threads = std::max<int64_t>(
                                            1, usable_cores() / std::max<int64_t>(1, run.local_ranks)),
                                        .on_progress = on_progress}));
}

}  // namespace trireme::train
