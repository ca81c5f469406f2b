// Several texts as one, by the weights of data.mixture; what is held out of each is validated for itself.
#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
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
  bool is_validated;  ///< enough of it is held out for a sequence
};

class MixtureData : public TokenData {
 public:
  MixtureData(const plan::Config& config, std::vector<MixedCorpus> corpora,
              const std::shared_ptr<const data::Mixture>& mixture, std::vector<HeldOutTokens> held_out)
      : TokenData(config, mixture, std::move(held_out), mixture), corpora_(std::move(corpora)) {}

  std::string description() const override;
  Sizes sizes() const override;
  void check_fits(const plan::ModelConfig& model) const override;
  const data::Tokenizer* tokenizer() const override { return corpora_.front().corpus.tokenizer.get(); }
  std::string why_no_validation() const override;
  std::vector<std::string> notes() const override;

 private:
  std::vector<MixedCorpus> corpora_;
};

std::string MixtureData::description() const {
  std::vector<std::string> parts;
  for (size_t i = 0; i < corpora_.size(); ++i) {
    parts.push_back(fmt::format("{:.4g}% {} ({})", 100.0 * mixture()->source_order().share(i),
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
        "choose another data.tokenizer",
        mixed.source.path, mixed.corpus.vocab_size - 1, model.vocab_size, mixed.corpus.vocab_size);
  }
}

std::string MixtureData::why_no_validation() const {
  if (val_samples() > 0 || config().data.val_fraction == 0.0) return {};
  return fmt::format(
      "data.val_fraction={} of each source of data.mixture is less than one sequence of {} tokens; raise it, "
      "or set train.val_batches=0",
      config().data.val_fraction, config().data.seq_len + 1);
}

std::vector<std::string> MixtureData::notes() const {
  std::vector<std::string> all;
  for (const MixedCorpus& mixed : corpora_) {
    if (!mixed.corpus.note.empty()) all.push_back(mixed.corpus.note);
    if (mixed.is_validated || val_samples() == 0) continue;
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
  std::vector<HeldOutTokens> held_out;
  const int64_t seq_len = run.config.data.seq_len;
  for (const plan::MixtureSource& source : run.config.data.mixture.sources) {
    data::PreparedCorpus corpus = open_corpus(run, source.path, on_progress);
    sources.push_back(
        {source.name, source.weight, std::make_shared<data::Dataset>(corpus.folder, "train", seq_len)});
    const auto its = held_out_of(corpus, seq_len, {.name = source.name, .weight = source.weight});
    held_out.insert(held_out.end(), its.begin(), its.end());
    corpora.push_back({source, std::move(corpus), !its.empty()});
  }
  return std::make_shared<MixtureData>(run.config, std::move(corpora),
                                       std::make_shared<data::Mixture>(std::move(sources)),
                                       std::move(held_out));
}

}  // namespace trireme::train
