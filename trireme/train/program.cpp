#include "trireme/train/program.h"

#include <algorithm>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/data/mixture.h"
#include "trireme/train/program_call.h"
#include "trireme/train/token_data.h"

namespace trireme::train {
namespace {

/// Samples of the program, whose tokens and order are as they must be, or an error says which are not.
class CheckedSamples : public data::TokenSamples {
 public:
  CheckedSamples(std::shared_ptr<const data::TokenSamples> samples, int64_t vocab_size)
      : samples_(std::move(samples)), vocab_size_(vocab_size) {}

  int64_t size() const override { return samples_->size(); }
  int64_t seq_len() const override { return samples_->seq_len(); }
  uint64_t digest() const override { return samples_->digest(); }
  bool ignores_targets() const override { return samples_->ignores_targets(); }
  std::optional<int64_t> end_token() const override { return samples_->end_token(); }
  std::optional<std::vector<int64_t>> document_begins(int64_t index) const override;
  void read(int64_t index, std::span<int64_t> tokens) const override {
    samples_->read(index, tokens);
    check(index, "token", tokens, false);
  }
  void read_targets(int64_t index, std::span<int64_t> tokens, std::span<int64_t> targets) const override {
    samples_->read_targets(index, tokens, targets);
    check(index, "token", tokens, false);
    check(index, "target", targets, ignores_targets());
  }
  int64_t kept_targets(int64_t index) const override;
  std::vector<int64_t> order(int64_t begin, int64_t count, uint64_t seed) const override;

 private:
  void check(int64_t index, const char* what, std::span<const int64_t> values, bool may_be_ignored) const;

  std::shared_ptr<const data::TokenSamples> samples_;
  int64_t vocab_size_;
};

void CheckedSamples::check(int64_t index, const char* what, std::span<const int64_t> values,
                           bool may_be_ignored) const {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] >= 0 && values[i] < vocab_size_) continue;
    if (may_be_ignored && values[i] == data::kIgnoredTarget) continue;
    throw DataError(
        "[train.program] {} {} of sample {} is {}, but OwnTokens::vocab_size={}; give values from 0 to {}",
        what, i, index, values[i], vocab_size_, vocab_size_ - 1);
  }
}

int64_t CheckedSamples::kept_targets(int64_t index) const {
  const int64_t kept = samples_->kept_targets(index);
  if (kept >= 0 && kept <= seq_len()) return kept;
  throw DataError("[train.program] kept_targets({}) of the samples is {}; give a number from 0 to {}", index,
                  kept, seq_len());
}

std::optional<std::vector<int64_t>> CheckedSamples::document_begins(int64_t index) const {
  auto begins = samples_->document_begins(index);
  for (size_t i = 0; begins && i < begins->size(); ++i) {
    const int64_t least = i == 0 ? 1 : (*begins)[i - 1] + 1, begin = (*begins)[i];
    if (begin >= least && begin < seq_len()) continue;
    throw DataError(
        "[train.program] document_begins({}) of the samples has {} as number {}; give rising places from 1 "
        "to "
        "{}",
        index, begin, i, seq_len() - 1);
  }
  return begins;
}

std::vector<int64_t> CheckedSamples::order(int64_t begin, int64_t count, uint64_t seed) const {
  std::vector<int64_t> indices = samples_->order(begin, count, seed);
  if (std::ssize(indices) != count) {
    throw DataError(
        "[train.program] order({}, {}) of the samples has {} entries; give as many as it asks for", begin,
        count, indices.size());
  }
  for (const int64_t index : indices) {
    if (index >= 0 && index < size()) continue;
    throw DataError("[train.program] order({}, {}) of the samples has {}; give numbers from 0 to {}", begin,
                    count, index, size() - 1);
  }
  return indices;
}

/// Adds samples as a set, or where they are a mixture each of its sources: its first samples alone would be
/// those of the first one.
void add_held_out(const std::shared_ptr<const data::TokenSamples>& samples, const RunData::HeldOutSet& set,
                  int64_t vocab_size, std::vector<HeldOutTokens>& sets) {
  const auto* const mixture = dynamic_cast<const data::Mixture*>(samples.get());
  if (mixture == nullptr) {
    sets.push_back({set, std::make_shared<CheckedSamples>(samples, vocab_size)});
    return;
  }
  for (size_t i = 0; i < mixture->sources().size(); ++i) {
    const data::MixedSource& source = mixture->sources()[i];
    const std::string name = set.name.empty() ? source.name : set.name + "/" + source.name;
    add_held_out(source.samples, {.name = name, .weight = set.weight * mixture->source_order().share(i)},
                 vocab_size, sets);
  }
}

std::vector<HeldOutTokens> held_out_sets_of(const OwnTokens& tokens) {
  std::vector<HeldOutTokens> sets;
  if (tokens.held_out) add_held_out(tokens.held_out, {}, tokens.vocab_size, sets);
  return sets;
}

class OwnData : public TokenData {
 public:
  OwnData(const plan::Config& config, const OwnTokens& tokens)
      : TokenData(config, std::make_shared<CheckedSamples>(tokens.train, tokens.vocab_size),
                  held_out_sets_of(tokens), std::dynamic_pointer_cast<const data::Mixture>(tokens.train)),
        description_(tokens.description),
        vocab_size_(tokens.vocab_size) {}

  std::string description() const override {
    return fmt::format("{}, {} + {} sequences", description_, with_commas(samples()),
                       with_commas(val_samples()));
  }
  Sizes sizes() const override {
    return {samples() * config().data.seq_len, val_samples() * config().data.seq_len};
  }
  void check_fits(const plan::ModelConfig& model) const override {
    if (vocab_size_ <= model.vocab_size) return;
    throw ConfigError(
        "[train.data] the tokens of the program's data go up to {}, but model.vocab_size={}; set it to at "
        "least {}",
        vocab_size_ - 1, model.vocab_size, vocab_size_);
  }

 private:
  std::string description_;
  int64_t vocab_size_;
};

void check_samples(const char* which, const data::TokenSamples& samples, const plan::Config& config) {
  if (samples.seq_len() != config.data.seq_len) {
    throw ConfigError(
        "[train.program] {} samples have seq_len {}, but data.seq_len={}; make them as long as the config "
        "says",
        which, samples.seq_len(), config.data.seq_len);
  }
  if (samples.size() >= 1) return;
  throw ConfigError("[train.program] there are {} {} samples; give at least 1{}", samples.size(), which,
                    std::string_view(which) == "training" ? "" : ", or leave them out");
}

bool is_metric_name(const std::string& name) {
  const auto fits = [](char letter) {
    return (letter >= 'a' && letter <= 'z') || (letter >= '0' && letter <= '9') || letter == '_';
  };
  return !name.empty() && std::ranges::all_of(name, fits);
}

void check_metric(const Metric& metric, std::set<std::string>& taken) {
  if (!is_metric_name(metric.name)) {
    throw ConfigError("[train.program] a metric is called '{}'; name it by letters a-z, digits and _",
                      metric.name);
  }
  if (!taken.insert(metric.name).second) {
    throw ConfigError("[train.program] the name '{}' of a metric is taken; choose another", metric.name);
  }
  if (!metric.add || metric.sums < 1 || (!metric.value && metric.sums != 2)) {
    throw ConfigError(
        "[train.program] the metric '{}' has {} sums{}{}; give it add() and at least 1, and value() unless "
        "it is the first of 2 divided by the second",
        metric.name, metric.sums, metric.add ? "" : ", no add()", metric.value ? "" : ", no value()");
  }
}

}  // namespace

std::shared_ptr<const RunData> make_run_data(const plan::Config& config, OwnTokens tokens) {
  if (plan::reads_images(config.model.family)) {
    throw ConfigError("[train.program] the program's data are tokens, but model.family={} reads images",
                      config.model.family);
  }
  if (!tokens.train) throw ConfigError("[train.program] there are no training samples; set OwnTokens::train");
  check_samples("training", *tokens.train, config);
  if (tokens.held_out) check_samples("held-out", *tokens.held_out, config);
  if (config.train.epochs > 0 && dynamic_cast<const data::Mixture*>(tokens.train.get()) != nullptr) {
    throw ConfigError(
        "[train.program] sources of a mixture end their epochs at different times, so train.epochs={} says "
        "no "
        "length; set train.steps",
        config.train.epochs);
  }
  if (tokens.vocab_size < 1) {
    throw ConfigError("[train.program] vocab_size={} of the program's data; say how many tokens there are",
                      tokens.vocab_size);
  }
  auto data = std::make_shared<OwnData>(config, tokens);
  data->check_documents();
  return data;
}

std::shared_ptr<const RunData> open_program_data(const TrainOptions& run) {
  if (run.program == nullptr || !run.program->open_data) {
    throw ConfigError(
        "[train.program] data.path={} stands for the data of a program of your own, but this program has "
        "none; start that one, or set data.path to a text or 'builtin'",
        plan::kProgramData);
  }
  std::shared_ptr<const RunData> data =
      call_of_program([&] { return run.program->open_data(run.config); }, "open_data()");
  if (!data)
    throw ConfigError("[train.program] open_data() of the program has opened nothing; let it return data");
  return data;
}

void check_program(const Program& program, const plan::Config& config) {
  std::set<std::string> taken = {"loss", "top1", "top5"};
  for (const Metric& metric : program.metrics) check_metric(metric, taken);
  for (const auto& callback : program.callbacks) {
    if (!callback) throw ConfigError("[train.program] a callback is null; leave it out");
  }
  if (program.metrics.empty() || (config.parallel.pp == 1 && config.parallel.cp == 1)) return;
  throw ConfigError(
      "[train.program] the metric '{}' needs all logits of a sequence on one rank, but parallel.pp={} and "
      "parallel.cp={} split them; set both to 1, or leave the program's metrics out",
      program.metrics.front().name, config.parallel.pp, config.parallel.cp);
}

double value_of(const Metric& metric, const std::vector<double>& sums) {
  if (!metric.value) return sums[0] / sums[1];
  return call_of_program([&] { return metric.value(sums); }, "value() of the metric '{}'", metric.name);
}

}  // namespace trireme::train
