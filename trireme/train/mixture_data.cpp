// Several texts as one, by the weights of data.mixture; what is held out of each is validated for itself.
#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/data/dataset.h"
#include "trireme/data/mixture.h"
#include "trireme/train/corpus_data.h"
#include "trireme/train/token_data.h"

namespace trireme::train {
namespace {

struct MixedCorpus {
  plan::MixtureSource source;
  data::PreparedCorpus corpus;
  std::shared_ptr<const data::TokenSamples> held_out;  ///< null: too little for a sequence
};

class MixtureData : public TokenData {
 public:
  MixtureData(const plan::Config& config, std::vector<MixedCorpus> corpora,
              std::shared_ptr<const data::Mixture> mixture)
      : TokenData(config, mixture, nullptr), corpora_(std::move(corpora)), mixture_(std::move(mixture)) {
    for (const MixedCorpus& corpus : corpora_) {
      if (corpus.held_out) held_out_.push_back(&corpus);
    }
  }

  std::string description() const override;
  Sizes sizes() const override;
  void check_fits(const plan::ModelConfig& model) const override;
  const data::Tokenizer* tokenizer() const override { return corpora_.front().corpus.tokenizer.get(); }
  uint64_t held_out_digest() const override;
  int64_t val_samples() const override;
  std::vector<HeldOutSet> held_out_sets() const override;
  ValidationFeed validation_of(size_t set, int64_t most, const FeedOptions& options) const override {
    return validation_on(held_out_[set]->held_out, most, options);
  }
  std::vector<SourceUse> sources_in(int64_t samples) const override;
  std::string why_no_validation() const override;
  std::vector<std::string> notes() const override;

 private:
  std::vector<MixedCorpus> corpora_;
  std::shared_ptr<const data::Mixture> mixture_;
  std::vector<const MixedCorpus*> held_out_;  ///< those of which something is held out
};

std::string MixtureData::description() const {
  std::vector<std::string> parts;
  for (size_t i = 0; i < corpora_.size(); ++i) {
    parts.push_back(fmt::format("{:.4g}% {} ({})", 100.0 * mixture_->source_order().share(i),
                                corpora_[i].source.name, corpora_[i].corpus.description));
  }
  return join(parts, ", ");
}

RunData::Sizes MixtureData::sizes() const {
  Sizes all;
  for (const MixedCorpus& mixed : corpora_) {
    all.train += mixed.corpus.train_tokens;
    all.val += mixed.corpus.val_tokens;
  }
  return all;
}

void MixtureData::check_fits(const plan::ModelConfig& model) const {
  for (const MixedCorpus& mixed : corpora_) {
    if (mixed.corpus.vocab_size <= model.vocab_size) continue;
    throw ConfigError(
        "[train.data] the tokens of {} go up to {}, but model.vocab_size={}; set it to at least {}, or "
        "choose "
        "another data.tokenizer",
        mixed.source.path, mixed.corpus.vocab_size - 1, model.vocab_size, mixed.corpus.vocab_size);
  }
}

uint64_t MixtureData::held_out_digest() const {
  if (held_out_.empty()) return 0;
  StreamingHash hash;
  for (const MixedCorpus* mixed : held_out_) {
    const uint64_t digest = mixed->held_out->digest();
    hash.update(&digest, sizeof digest);
  }
  return hash.digest();
}

int64_t MixtureData::val_samples() const {
  int64_t all = 0;
  for (const MixedCorpus* mixed : held_out_) all += mixed->held_out->size();
  return all;
}

std::vector<RunData::HeldOutSet> MixtureData::held_out_sets() const {
  std::vector<HeldOutSet> sets;
  for (const MixedCorpus* mixed : held_out_) sets.push_back({mixed->source.name, mixed->source.weight});
  return sets;
}

std::vector<SourceUse> MixtureData::sources_in(int64_t samples) const {
  std::vector<SourceUse> uses;
  const data::SourceOrder& order = mixture_->source_order();
  for (size_t i = 0; i < corpora_.size(); ++i) {
    uses.push_back({.name = corpora_[i].source.name,
                    .share = order.share(i),
                    .samples = order.turns(i, samples),
                    .epochs = mixture_->epochs(i, samples)});
  }
  return uses;
}

std::string MixtureData::why_no_validation() const {
  if (!held_out_.empty() || config().data.val_fraction == 0.0) return {};
  return fmt::format(
      "data.val_fraction={} of each source of data.mixture is less than one sequence of {} tokens; raise it, "
      "or set "
      "train.val_batches=0",
      config().data.val_fraction, config().data.seq_len + 1);
}

std::vector<std::string> MixtureData::notes() const {
  std::vector<std::string> all;
  for (const MixedCorpus& mixed : corpora_) {
    if (!mixed.corpus.note.empty()) all.push_back(mixed.corpus.note);
    if (mixed.held_out || held_out_.empty()) continue;
    all.push_back(
        fmt::format("{} is not validated: what is held out of it is less than one sequence; raise "
                    "data.val_fraction",
                    mixed.source.name));
  }
  return all;
}

}  // namespace

std::shared_ptr<const RunData> open_mixture(const TrainOptions& run, const data::OnProgress& on_progress) {
  std::vector<MixedCorpus> corpora;
  std::vector<data::MixedSource> sources;
  const int64_t seq_len = run.config.data.seq_len;
  for (const plan::MixtureSource& source : run.config.data.mixture.sources) {
    data::PreparedCorpus corpus = open_corpus(run, source.path, on_progress);
    sources.push_back(
        {source.name, source.weight, std::make_shared<data::Dataset>(corpus.folder, "train", seq_len)});
    auto held_out = held_out_of(corpus, seq_len);
    corpora.push_back({source, std::move(corpus), std::move(held_out)});
  }
  return std::make_shared<MixtureData>(run.config, std::move(corpora),
                                       std::make_shared<data::Mixture>(std::move(sources)));
}

}  // namespace trireme::train
