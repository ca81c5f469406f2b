#pragma once
// How likely a model finds given tokens: what `trireme eval` counts.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/comm/mesh.h"
#include "trireme/comm/world.h"
#include "trireme/nn/language_model.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/config.h"

namespace trireme::train {

/// Tokens of which those from index `from` on, at least 1, are scored, each by those before it.
struct ScoredTokens {
  std::vector<int32_t> tokens;
  size_t from = 1;
};

/// A model whose parameters are sharded over all ranks, and gathered unit by unit in a pass. Without dropout,
/// in fp32.
class Scorer {
 public:
  /// `model` is complete; `weights` as state::load_weights() takes them. Collective.
  Scorer(const plan::ModelConfig& model, const std::string& weights, std::shared_ptr<comm::World> world);
  Scorer(const Scorer&) = delete;
  Scorer& operator=(const Scorer&) = delete;
  ~Scorer();

  /// What next() gives, until it gives none; the same on every rank.
  using Next = std::function<std::optional<ScoredTokens>()>;
  /// Minus the log-likelihood in nats of the scored tokens of each, in order, on every rank. Ranks take turns
  /// with batches of rows that follow each other, so that the number of ranks changes no batch. An exception
  /// of next() must come on all ranks. Collective.
  std::vector<double> score(const Next& next);

 private:
  std::vector<double> score_batch(const std::vector<ScoredTokens>& rows);

  std::shared_ptr<nn::LanguageModel> model_;
  int64_t vocab_size_;
  comm::Mesh mesh_;
  std::unique_ptr<parallel::DataParallel> engine_;
};

}  // namespace trireme::train
