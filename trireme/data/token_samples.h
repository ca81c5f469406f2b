#pragma once
// Where sequences of tokens come from, as a loader sees it: shards on disk, or a data set of one's own.
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace trireme::data {

/// The target of a token whose loss does not count, as torch has it.
inline constexpr int64_t kIgnoredTarget = -100;

/// Sequences of seq_len() + 1 tokens by their numbers, of which the last is only predicted. All functions are
/// pure, and may be called by several threads at once.
class TokenSamples {
 public:
  virtual ~TokenSamples() = default;
  virtual int64_t size() const = 0;  ///< samples
  virtual int64_t seq_len() const = 0;
  /// A hash of all that read() gives: other samples have another hash.
  virtual uint64_t digest() const = 0;
  /// Writes the seq_len() + 1 tokens of sample `index`, of size() ones. May throw DataError.
  virtual void read(int64_t index, std::span<int64_t> tokens) const = 0;
  /// The same, and what each of the first seq_len() tokens is to predict: the next one, unless a class has
  /// targets that do not count (kIgnoredTarget).
  virtual void read_targets(int64_t index, std::span<int64_t> tokens, std::span<int64_t> targets) const;
  /// Whether there are such targets.
  virtual bool ignores_targets() const { return false; }
  /// The number of targets in the sample that count.
  virtual int64_t kept_targets([[maybe_unused]] int64_t index) const { return seq_len(); }
  /// The last token of each document, for data.reset_attention; none: documents cannot be told apart by it.
  /// Shards of text have that of their tokenizer.
  virtual std::optional<int64_t> end_token() const { return std::nullopt; }
  /// The places at which documents begin in sample `index`, behind its first token and in rising order, where
  /// a class knows more than end tokens tell; none: they tell. Asked for where there is an end_token().
  virtual std::optional<std::vector<int64_t>> document_begins([[maybe_unused]] int64_t index) const {
    return std::nullopt;
  }
  /// The samples at positions [begin, begin + count) of a run with this seed: all of an epoch, in an order
  /// that is new in each (data/sampler.h), unless a class has an order of its own. The same on all ranks, of
  /// which each asks for its own positions.
  virtual std::vector<int64_t> order(int64_t begin, int64_t count, uint64_t seed) const;
};

}  // namespace trireme::data
