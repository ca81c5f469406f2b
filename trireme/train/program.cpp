#include "trireme/train/program.h"

#include <algorithm>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/train/token_data.h"

namespace trireme::train {
namespace {

class OwnData : public TokenData {
 public:
  OwnData(const plan::Config& config, const OwnTokens& tokens)
      : TokenData(config, tokens.train, tokens.held_out),
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
        "least "
        "{}",
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
        "it "
        "is the first of 2 divided by the second",
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
  if (tokens.vocab_size < 1) {
    throw ConfigError("[train.program] vocab_size={} of the program's data; say how many tokens there are",
                      tokens.vocab_size);
  }
  return std::make_shared<OwnData>(config, tokens);
}

std::shared_ptr<const RunData> open_program_data(const TrainOptions& run) {
  if (run.program == nullptr || !run.program->open_data) {
    throw ConfigError(
        "[train.program] data.path={} stands for the data of a program of your own, but this program has "
        "none; "
        "start that one, or set data.path to a text or 'builtin'",
        plan::kProgramData);
  }
  std::shared_ptr<const RunData> data = run.program->open_data(run.config);
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
  return metric.value ? metric.value(sums) : sums[0] / sums[1];
}

}  // namespace trireme::train
