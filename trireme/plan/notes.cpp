#include "trireme/plan/notes.h"

#include <fmt/format.h>

#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

/// Keys of the section pipeline that were given where there is no pipeline.
std::vector<std::string> unused_pipeline_keys(const Config& config) {
  if (config.parallel.pp > 1) return {};
  Config given = config, defaults;
  const std::vector<Field> values = fields(given), unset = fields(defaults);
  std::vector<std::string> keys;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].key.starts_with("pipeline.") && value_of(values[i]) != value_of(unset[i]))
      keys.push_back(values[i].key);
  }
  return keys;
}

/// A note on byte tokens for a model of another vocabulary; empty: none is needed.
std::string byte_tokens_note(const Config& config) {
  constexpr int64_t kBytes = 256;
  const ModelConfig& model = config.model;
  if (reads_images(model.family) || config.data.tokenizer != kByteTokenizer) return {};
  if (!model.weights.empty()) {
    if (model.vocab_size == kBytes) return {};
    return fmt::format(
        "text is read as bytes (data.tokenizer=byte), not as tokens of the vocabulary of {} that "
        "model.weights={} were trained with; data.tokenizer names theirs",
        with_commas(model.vocab_size), model.weights);
  }
  if (model.vocab_size < 2 * kBytes) return {};
  const int64_t matrices = model.tie_embeddings ? 1 : 2;
  const auto unused = static_cast<double>(matrices * (model.vocab_size - kBytes) * model.d_model);
  return fmt::format(
      "byte tokens use {} of model.vocab_size={} rows; model.vocab_size={} saves {} parameters", kBytes,
      with_commas(model.vocab_size), kBytes, format_count(unused));
}

}  // namespace

std::vector<std::string> notes(const Config& config, Device device) {
  std::vector<std::string> found;
  if (const std::string note = byte_tokens_note(config); !note.empty()) found.push_back(note);
  const TrainConfig& train = config.train;
  if (train.rank_batch > 0 && train.global_batch != TrainConfig{}.global_batch) {
    found.push_back(fmt::format("train.global_batch={} has no effect with train.rank_batch={}",
                                train.global_batch, train.rank_batch));
  }
  if (train.epochs > 0 && train.steps != TrainConfig{}.steps) {
    found.push_back(fmt::format("train.steps={} has no effect with train.epochs={}; set train.epochs to 0",
                                train.steps, train.epochs));
  }
  constexpr double kMuchForSgd = 0.01;
  if (config.optim.name == OptimizerName::kSgd && config.optim.weight_decay > kMuchForSgd) {
    found.push_back(fmt::format(
        "optim.weight_decay={:g} is added to the gradient by sgd (L2), where it may keep the model "
        "from learning; usual values are 0 to 5e-4",
        config.optim.weight_decay));
  }
  for (const std::string& key : unused_pipeline_keys(config))
    found.push_back(fmt::format("{} has no effect with parallel.pp=1", key));
  if (config.train.profile_steps > 0 && device == Device::kCpu) {
    found.push_back(
        fmt::format("train.profile_steps={} without a GPU traces CPU operators, and sums those up by kind",
                    config.train.profile_steps));
  }
  return found;
}

}  // namespace trireme::plan
