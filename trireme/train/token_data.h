#pragma once
// Sequences of tokens as a run reads them, wherever they come from: the order, and the part of each rank.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "trireme/data/mixture.h"
#include "trireme/data/token_samples.h"
#include "trireme/plan/config.h"
#include "trireme/train/run_data.h"

namespace trireme::train {

/// Held-out samples that are validated for themselves.
struct HeldOutTokens {
  RunData::HeldOutSet set;  ///< the only one may have no name
  std::shared_ptr<const data::TokenSamples> samples;
};

class TokenData : public RunData {
 public:
  std::string counted() const override { return "tokens"; }
  int64_t samples() const override { return train_->size(); }
  uint64_t digest() const override { return train_->digest(); }
  uint64_t held_out_digest() const override;
  Feed feed(const FeedOptions& options) const override;
  int64_t val_samples() const override;
  std::vector<HeldOutSet> held_out_sets() const override;
  ValidationFeed validation(int64_t most, const FeedOptions& options) const override {
    return validation_of(0, most, options);
  }
  /// Data-parallel ranks take contiguous parts, and a rank that runs out joins the others with no rows.
  ValidationFeed validation_of(size_t set, int64_t most, const FeedOptions& options) const override;
  std::vector<SourceUse> sources_in(int64_t samples) const override;
  /// Throws ConfigError where data.reset_attention asks for documents, and no token ends them.
  void check_documents() const;

 protected:
  /// `mixture`: what `train` is made of, where it is one.
  TokenData(plan::Config config, std::shared_ptr<const data::TokenSamples> train,
            std::vector<HeldOutTokens> held_out, std::shared_ptr<const data::Mixture> mixture = nullptr)
      : config_(std::move(config)),
        train_(std::move(train)),
        held_out_(std::move(held_out)),
        mixture_(std::move(mixture)) {}

  const plan::Config& config() const { return config_; }
  const data::Mixture* mixture() const { return mixture_.get(); }

 private:
  /// The last token of documents that are kept apart.
  std::optional<int64_t> end_token() const;

  plan::Config config_;
  std::shared_ptr<const data::TokenSamples> train_;
  std::vector<HeldOutTokens> held_out_;
  std::shared_ptr<const data::Mixture> mixture_;
};

}  // namespace trireme::train
