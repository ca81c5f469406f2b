#include "trireme/train/token_data.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/data/loader.h"
#include "trireme/nn/context.h"

namespace trireme::train {
namespace {

/// Samples [first, first + count).
data::Batch read_samples(const data::TokenSamples& samples, int64_t first, int64_t count,
                         std::optional<int64_t> end_token) {
  const int64_t length = samples.seq_len(), width = length + 1;
  at::Tensor tokens = at::empty({count, width}, at::kLong), targets = at::empty({count, length}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    samples.read_targets(first + i, {tokens.data_ptr<int64_t>() + i * width, static_cast<size_t>(width)},
                         {targets.data_ptr<int64_t>() + i * length, static_cast<size_t>(length)});
  }
  data::Batch batch{.inputs = tokens.narrow(1, 0, length), .targets = targets};
  if (!end_token) return batch;
  std::vector<int64_t> indices(static_cast<size_t>(count));
  std::iota(indices.begin(), indices.end(), first);
  batch.documents = data::document_table(samples, indices, batch.inputs, *end_token);
  return batch;
}

/// Samples that a data-parallel rank validates on.
struct Part {
  int64_t begin, end;
  int64_t rows(int64_t done, int64_t at_once) const {
    return std::clamp<int64_t>(end - begin - done, 0, at_once);
  }
};

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

/// Targets that count in samples [begin, end); 0 where all do.
int64_t kept_between(const data::TokenSamples& samples, int64_t begin, int64_t end) {
  int64_t kept = 0;
  for (int64_t sample = begin; samples.ignores_targets() && sample < end; ++sample)
    kept += samples.kept_targets(sample);
  return kept;
}

}  // namespace

std::optional<int64_t> TokenData::end_token() const {
  if (!config_.data.reset_attention) return std::nullopt;
  if (const data::Tokenizer* const made_by = tokenizer()) return made_by->document_separator();
  return train_->end_token();
}

void TokenData::check_documents() const {
  if (!config_.data.reset_attention || end_token()) return;
  throw ConfigError(
      "[train.data] data.reset_attention=true keeps documents apart, but nothing says which token ends one "
      "in "
      "{}; return it from TokenSamples::end_token(), or set data.reset_attention to false",
      description());
}

Feed TokenData::feed(const FeedOptions& options) const {
  const auto loader = std::make_shared<data::Loader>(
      train_, data::LoaderOptions{
                  .order = [train = train_, seed = static_cast<uint64_t>(config_.seed)](
                               int64_t begin, int64_t count) { return train->order(begin, count, seed); },
                  .global_batch = options.global_batch,
                  .micro_batch = options.micro_batch,
                  .dp_rank = options.dp_rank,
                  .dp_size = options.dp_size,
                  .cursor = options.first_step * options.global_batch,
                  .pin_memory = options.pin_memory,
                  .end_token = end_token(),
                  .vocab_size = config_.model.vocab_size});
  return [loader, options] { return tokens_of_rank(loader->next(), options); };
}

uint64_t TokenData::held_out_digest() const {
  if (held_out_.empty()) return 0;
  if (held_out_.size() == 1) return held_out_.front().samples->digest();
  StreamingHash hash;
  for (const HeldOutTokens& held_out : held_out_) {
    const uint64_t digest = held_out.samples->digest();
    hash.update(&digest, sizeof digest);
  }
  return hash.digest();
}

int64_t TokenData::val_samples() const {
  int64_t all = 0;
  for (const HeldOutTokens& held_out : held_out_) all += held_out.samples->size();
  return all;
}

std::vector<RunData::HeldOutSet> TokenData::held_out_sets() const {
  std::vector<HeldOutSet> sets;
  for (const HeldOutTokens& held_out : held_out_) {
    if (!held_out.set.name.empty()) sets.push_back(held_out.set);
  }
  return sets;
}

std::vector<SourceUse> TokenData::sources_in(int64_t samples) const {
  std::vector<SourceUse> uses;
  for (size_t i = 0; mixture_ && i < mixture_->sources().size(); ++i) {
    uses.push_back({.name = mixture_->sources()[i].name,
                    .share = mixture_->source_order().share(i),
                    .samples = mixture_->source_order().turns(i, samples),
                    .epochs = mixture_->epochs(i, samples)});
  }
  return uses;
}

ValidationFeed TokenData::validation_of(size_t set, int64_t most, const FeedOptions& options) const {
  const std::shared_ptr<const data::TokenSamples> held_out = held_out_.at(set).samples;
  const int64_t ranks = options.dp_size, total = std::min(most, held_out->size()),
                at_once = options.micro_batch;
  const auto part_of = [=](int64_t rank) { return Part{total * rank / ranks, total * (rank + 1) / ranks}; };
  const int64_t largest_part = (total + ranks - 1) / ranks;
  const auto done = std::make_shared<int64_t>(0);
  // A program's held-out data may end documents with a token of their own.
  const std::optional<int64_t> of_run = end_token(), own = held_out->end_token(),
                               end = of_run && !tokenizer() && own ? own : of_run;
  const auto next = [=, end_token = end, mine = part_of(options.dp_rank)] {
    const int64_t rows = mine.rows(*done, at_once);
    data::Batch batch =
        read_samples(*held_out, rows > 0 ? mine.begin + *done : 0, std::max<int64_t>(1, rows), end_token);
    batch.rows = rows;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const Part part = part_of(rank);
      const int64_t first = part.begin + *done, count = part.rows(*done, at_once);
      batch.step_rows += count;
      batch.step_kept += kept_between(*held_out, first, first + count);
    }
    if (held_out->ignores_targets() && batch.step_kept == 0) batch.rows = 0;  // nothing counts on any rank
    if (batch.rows > 0) batch.kept = kept_between(*held_out, mine.begin + *done, mine.begin + *done + rows);
    *done += at_once;
    return tokens_of_rank(std::move(batch), options);
  };
  return {.next = next, .batches = (largest_part + at_once - 1) / at_once};
}

}  // namespace trireme::train
