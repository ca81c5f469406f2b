#pragma once
// Token shards on disk, and sequences of them. A shard is a header, the tokens (uint16 or uint32) and the
// checksum of each chunk; chunks are verified when first touched.
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trireme/data/token_samples.h"

namespace trireme::data {

class TokenShard;

/// All shards of one split ("train" or "val") as a sequence of samples of seq_len + 1 tokens, packed without
/// gaps: sample i starts at token i * seq_len, so that neighbours share one token. Thread-safe.
class Dataset : public TokenSamples {
 public:
  /// Throws DataError when the index or a shard is missing, truncated or of another version.
  Dataset(const std::string& folder, const std::string& split, int64_t seq_len);
  ~Dataset() override;

  int64_t size() const override { return samples_; }
  int64_t tokens() const { return tokens_; }
  int64_t seq_len() const override { return seq_len_; }
  int64_t vocab_size() const { return vocab_size_; }
  /// A hash of all tokens, made from the checksums stored with them: other tokens give another hash.
  uint64_t digest() const override;

  /// Copies the seq_len + 1 tokens of sample `index`. Throws DataError naming file and chunk when a checksum
  /// fails, or when a token is outside the vocabulary.
  void read(int64_t index, std::span<int64_t> tokens) const override;
  /// The same, and what each of the first seq_len tokens is to predict: the next one, or kIgnoredTarget where
  /// its loss does not count.
  void read_targets(int64_t index, std::span<int64_t> tokens, std::span<int64_t> targets) const override;
  /// Whether there are targets that do not count.
  bool ignores_targets() const override { return marked_; }
  /// The number of targets in the sample that count. Reads the sample the first time.
  int64_t kept_targets(int64_t index) const override;
  /// Places where conversations begin, and what fills the sample behind them; none for running text, and
  /// where the shards do not say so.
  std::optional<std::vector<int64_t>> document_begins(int64_t index) const override;

 private:
  bool counts(int64_t stored) const { return !marked_ || stored / vocab_size_ == 1; }
  bool begins(int64_t stored) const { return stored / vocab_size_ == 2; }
  int64_t id_of(int64_t stored) const;
  /// Copies the tokens of sample `index` as they are stored.
  void read_stored(int64_t index, std::span<int64_t> tokens) const;
  /// Copies the tokens of the split from index `begin` on.
  void read_tokens(int64_t begin, std::span<int64_t> tokens) const;
  void check_ids(int64_t index, std::span<const int64_t> tokens) const;

  std::string folder_;
  std::vector<std::unique_ptr<TokenShard>> shards_;
  int64_t seq_len_ = 0, tokens_ = 0, samples_ = 0, vocab_size_ = 0;
  int64_t stored_values_ = 0;                       ///< tokens are stored as numbers below it
  bool marked_ = false, marks_begins_ = false;      ///< tokens are of kinds (TokenIndex), and of which
  mutable std::vector<std::atomic<int32_t>> kept_;  ///< by sample, of marked tokens; -1: not counted yet
};

}  // namespace trireme::data
