// Text as a run reads it: token shards in the cache.
#include <algorithm>
#include <cmath>

#include "trireme/base/cores.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/data/dataset.h"
#include "trireme/train/corpus_data.h"
#include "trireme/train/token_data.h"

namespace trireme::train {

std::vector<HeldOutTokens> held_out_of(const data::PreparedCorpus& corpus, int64_t seq_len,
                                       const RunData::HeldOutSet& set) {
  if (corpus.val_tokens <= seq_len) return {};
  return {{set, std::make_shared<data::Dataset>(corpus.folder, "val", seq_len)}};
}

namespace {

class TextData : public TokenData {
 public:
  TextData(const plan::Config& config, data::PreparedCorpus corpus)
      : TokenData(config, std::make_shared<data::Dataset>(corpus.folder, "train", config.data.seq_len),
                  held_out_of(corpus, config.data.seq_len, {})),
        corpus_(std::move(corpus)) {}

  std::string description() const override { return corpus_.description; }
  Sizes sizes() const override { return {corpus_.train_tokens, corpus_.val_tokens}; }
  void check_fits(const plan::ModelConfig& model) const override;
  const data::Tokenizer* tokenizer() const override { return corpus_.tokenizer.get(); }
  std::string why_no_validation() const override;
  std::vector<std::string> notes() const override {
    return corpus_.note.empty() ? std::vector<std::string>() : std::vector{corpus_.note};
  }

 private:
  std::string longer_validation() const;

  data::PreparedCorpus corpus_;
};

void TextData::check_fits(const plan::ModelConfig& model) const {
  if (corpus_.vocab_size <= model.vocab_size) return;
  throw ConfigError(
      "[train.data] the tokens of {} ({}) go up to {}, but model.vocab_size={}; set model.vocab_size to at "
      "least {}, or choose another data.tokenizer",
      config().data.path, corpus_.folder, corpus_.vocab_size - 1, model.vocab_size, corpus_.vocab_size);
}

/// Advice on how validation gets at least one sequence.
std::string TextData::longer_validation() const {
  const auto text = static_cast<double>(corpus_.train_tokens + corpus_.val_tokens);
  const double share = std::ceil(120.0 * static_cast<double>(config().data.seq_len + 1) / text) / 100.0;
  constexpr double kMost = 0.5;  // of data.val_fraction
  if (share > kMost) return "use a longer text or a smaller data.seq_len";
  return fmt::format("raise it to {}", share);
}

std::string TextData::why_no_validation() const {
  if (val_samples() > 0 || config().data.val_fraction == 0.0) return {};
  return fmt::format(
      "data.val_fraction={} of {} tokens holds out {}, but one sequence needs {}; {}, or set "
      "train.val_batches=0",
      config().data.val_fraction, corpus_.train_tokens + corpus_.val_tokens, corpus_.val_tokens,
      config().data.seq_len + 1, longer_validation());
}

}  // namespace

data::PreparedCorpus open_corpus(const TrainOptions& run, const std::string& path,
                                 const data::OnProgress& on_progress) {
  const plan::DataConfig& config = run.config.data;
  return data::prepare_corpus(
      {.path = path,
       .builtin_root = run.builtin_corpus,
       .tokenizer = config.tokenizer,
       .format = config.format,
       .loss_on = config.loss_on,
       .chat_template = config.chat_template,
       .keep_apart = config.reset_attention,
       .val_fraction = config.val_fraction,
       .cache_dir = run.cache_dir,
       .seq_len = config.seq_len,
       .threads = std::max<int64_t>(1, usable_cores() / std::max<int64_t>(1, run.local_ranks)),
       .on_progress = on_progress});
}

std::shared_ptr<const RunData> open_text(const TrainOptions& run, const data::OnProgress& on_progress) {
  return std::make_shared<TextData>(run.config, open_corpus(run, run.config.data.path, on_progress));
}

}  // namespace trireme::train
