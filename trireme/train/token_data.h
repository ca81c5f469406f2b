#pragma once
// Sequences of tokens as a run reads them, wherever they come from: the order, and the part of each rank.
#include <cstdint>
#include <memory>
#include <string>

#include "trireme/data/token_samples.h"
#include "trireme/plan/config.h"
#include "trireme/train/run_data.h"

namespace trireme::train {

/// Micro-batches of at most `most` of these samples, as RunData::validation() has it.
ValidationFeed validation_on(const std::shared_ptr<const data::TokenSamples>& held_out, int64_t most,
                             const FeedOptions& options);

class TokenData : public RunData {
 public:
  std::string counted() const override { return "tokens"; }
  int64_t samples() const override { return train_->size(); }
  uint64_t digest() const override { return train_->digest(); }
  uint64_t held_out_digest() const override { return val_ ? val_->digest() : 0; }
  Feed feed(const FeedOptions& options) const override;
  int64_t val_samples() const override { return val_ ? val_->size() : 0; }
  ValidationFeed validation(int64_t most, const FeedOptions& options) const override;

 protected:
  /// `val` may be null: nothing is held out.
  TokenData(plan::Config config, std::shared_ptr<const data::TokenSamples> train,
            std::shared_ptr<const data::TokenSamples> val)
      : config_(std::move(config)), train_(std::move(train)), val_(std::move(val)) {}

  const plan::Config& config() const { return config_; }

 private:
  plan::Config config_;
  std::shared_ptr<const data::TokenSamples> train_, val_;
};

}  // namespace trireme::train
