#pragma once
// Several sources of samples as one, each with its share: which source a position takes its sample from is a
// pure function of the position.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "trireme/data/token_samples.h"

namespace trireme::data {

/// Shares of sources as whole numbers whose sum is the period of their order: 0.7, 0.2 and 0.1 are 7, 2
/// and 1. Weights without a small common denominator are rounded to parts of kLongestPeriod. Throws
/// ConfigError for weights that are not positive, or too small beside the others to get a part.
std::vector<int64_t> whole_shares(const std::vector<double>& weights);
inline constexpr int64_t kLongestPeriod = int64_t{1} << 20;

/// The order of sources in a mixture: of the first n positions each source has its share of n, but for less
/// than one (Tijdeman, The chairman assignment problem, 1980).
class SourceOrder {
 public:
  /// `shares` as whole_shares() gives them.
  explicit SourceOrder(std::vector<int64_t> shares);

  size_t sources() const { return shares_.size(); }
  int64_t period() const { return static_cast<int64_t>(slots_.size()); }
  double share(size_t source) const {
    return static_cast<double>(shares_[source]) / static_cast<double>(period());
  }
  /// Whose turn it is at a position, and how many turns that source has had before.
  struct Turn {
    size_t source;
    int64_t number;
  };
  Turn at(int64_t position) const;
  /// Turns of a source among the first `positions`.
  int64_t turns(size_t source, int64_t positions) const;

 private:
  struct Slot {
    uint32_t source, number;
  };
  std::vector<int64_t> shares_;
  std::vector<Slot> slots_;                             ///< of one period
  std::vector<std::vector<uint32_t>> slots_by_source_;  ///< their numbers, rising
};

/// A source of a mixture.
struct MixedSource {
  std::string name;
  double weight = 1.0;
  std::shared_ptr<const TokenSamples> samples;
};

/// The samples of all sources, one source after the other; and the order in which a run reads them.
class Mixture : public TokenSamples {
 public:
  /// Throws ConfigError for sources without names of their own, without samples, of different lengths, and
  /// for weights that whole_shares() refuses.
  explicit Mixture(std::vector<MixedSource> sources);

  int64_t size() const override { return begins_.back(); }
  int64_t seq_len() const override { return sources_.front().samples->seq_len(); }
  /// Other sources, names or shares have another one.
  uint64_t digest() const override;
  void read(int64_t index, std::span<int64_t> tokens) const override;
  void read_targets(int64_t index, std::span<int64_t> tokens, std::span<int64_t> targets) const override;
  bool ignores_targets() const override;
  int64_t kept_targets(int64_t index) const override;
  std::optional<std::vector<int64_t>> document_begins(int64_t index) const override;
  /// End token of all sources; none where they differ.
  std::optional<int64_t> end_token() const override;

  /// Each source goes through its own samples, in an order of its own that is new in each of its epochs.
  std::vector<int64_t> order(int64_t begin, int64_t count, uint64_t seed) const override;

  const std::vector<MixedSource>& sources() const { return sources_; }
  const SourceOrder& source_order() const { return order_; }
  /// How often a run has gone through a source in its first `positions` samples.
  double epochs(size_t source, int64_t positions) const;

 private:
  /// A sample of all as one of its source.
  struct Place {
    const TokenSamples& samples;
    int64_t index;
  };
  Place place_of(int64_t index) const;

  std::vector<MixedSource> sources_;
  SourceOrder order_;
  std::vector<int64_t> begins_;  ///< of each source among all samples; last their number
};

}  // namespace trireme::data
