#include "trireme/data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/data/sampler.h"

namespace trireme::data {
namespace {

/// The weights times the smallest power of ten that makes them whole, without a common divisor; empty: their
/// sum would be too large.
std::vector<int64_t> exact_shares(const std::vector<double>& weights) {
  constexpr double kMostDecimals = 1e6, kSlack = 1e-9;
  for (double scale = 1.0; scale <= kMostDecimals; scale *= 10.0) {
    std::vector<int64_t> shares;
    int64_t divisor = 0;
    for (const double weight : weights) {
      const double scaled = weight * scale, whole = std::round(scaled);
      if (whole < 1.0 || whole > 1e12 || std::fabs(scaled - whole) > kSlack * scaled) break;
      shares.push_back(static_cast<int64_t>(whole));
      divisor = std::gcd(divisor, shares.back());
    }
    if (shares.size() < weights.size()) continue;
    for (int64_t& share : shares) share /= divisor;
    const int64_t period = std::accumulate(shares.begin(), shares.end(), int64_t{0});
    return period <= kLongestPeriod ? shares : std::vector<int64_t>();
  }
  return {};
}

/// What rounding down leaves over goes to the sources that lost most by it.
std::vector<int64_t> rounded_shares(const std::vector<double>& weights, double sum) {
  std::vector<int64_t> shares;
  std::vector<std::pair<double, size_t>> lost;
  int64_t left = kLongestPeriod;
  for (const double weight : weights) {
    const double exact = weight / sum * static_cast<double>(kLongestPeriod);
    shares.push_back(static_cast<int64_t>(exact));
    lost.emplace_back(std::floor(exact) - exact, shares.size() - 1);
    left -= shares.back();
  }
  std::ranges::sort(lost);
  for (size_t i = 0; left > 0; ++i, --left) ++shares[lost[i % lost.size()].second];
  return shares;
}

}  // namespace

std::vector<int64_t> whole_shares(const std::vector<double>& weights) {
  double sum = 0.0;
  for (const double weight : weights) {
    if (!std::isfinite(weight) || weight <= 0.0)
      throw ConfigError("[data.mixture] a weight is {}; give each source one above 0, or leave it out",
                        weight);
    sum += weight;
  }
  if (std::vector<int64_t> exact = exact_shares(weights); !exact.empty()) return exact;
  std::vector<int64_t> shares = rounded_shares(weights, sum);
  const auto none = std::ranges::find(shares, 0);
  if (none == shares.end()) return shares;
  throw ConfigError(
      "[data.mixture] the weight {} is less than 1 / {} of their sum ({}); leave the source out, or raise it",
      weights[static_cast<size_t>(none - shares.begin())], kLongestPeriod, sum);
}

/// At position n a source may have its turn when it is behind its share by 1 / (2 k - 2) of a sample or more;
/// of these the one gets it that would otherwise be too far behind first.
SourceOrder::SourceOrder(std::vector<int64_t> shares) : shares_(std::move(shares)) {
  TRIREME_CHECK(!shares_.empty() && std::ranges::min(shares_) >= 1, "[data.mixture] a source has no share");
  const int64_t period = std::accumulate(shares_.begin(), shares_.end(), int64_t{0});
  const int64_t parts = std::max<int64_t>(1, 2 * std::ssize(shares_) - 2);
  std::vector<int64_t> taken(shares_.size(), 0);
  const auto may = [&](size_t i, int64_t n) {
    return parts * (n * shares_[i] - period * taken[i]) >= period;
  };
  const auto due = [&](size_t i) {
    return static_cast<double>(period * (parts - 1 + parts * taken[i])) / static_cast<double>(shares_[i]);
  };
  slots_.reserve(static_cast<size_t>(period));
  slots_by_source_.resize(shares_.size());
  for (int64_t n = 1; n <= period; ++n) {
    size_t next = shares_.size();
    for (size_t i = 0; i < shares_.size(); ++i) {
      if (may(i, n) && (next == shares_.size() || due(i) < due(next))) next = i;
    }
    TRIREME_CHECK(next < shares_.size(), "[data.mixture] no source is due at position {}", n);
    slots_by_source_[next].push_back(static_cast<uint32_t>(n - 1));
    slots_.push_back({static_cast<uint32_t>(next), static_cast<uint32_t>(taken[next]++)});
  }
}

SourceOrder::Turn SourceOrder::at(int64_t position) const {
  const Slot& slot = slots_[static_cast<size_t>(position % period())];
  return {slot.source, position / period() * shares_[slot.source] + slot.number};
}

int64_t SourceOrder::turns(size_t source, int64_t positions) const {
  const std::vector<uint32_t>& slots = slots_by_source_[source];
  const auto within = std::ranges::lower_bound(slots, positions % period()) - slots.begin();
  return positions / period() * shares_[source] + within;
}

namespace {

std::vector<MixedSource> checked(std::vector<MixedSource> sources) {
  if (sources.empty()) throw ConfigError("[data.mixture] there is no source; give at least one");
  std::set<std::string> names;
  for (const auto& [name, weight, samples] : sources) {
    if (name.empty() || !names.insert(name).second)
      throw ConfigError("[data.mixture] the name '{}' of a source is empty or taken; give each its own",
                        name);
    if (!samples || samples->size() < 1) {
      throw ConfigError("[data.mixture] {} has no sample; leave it out, or give it more than one window",
                        name);
    }
    if (samples->seq_len() != sources.front().samples->seq_len()) {
      throw ConfigError(
          "[data.mixture] samples of {} have {} tokens, but those of {} have {}; make them equal", name,
          samples->seq_len(), sources.front().name, sources.front().samples->seq_len());
    }
  }
  return sources;
}

std::vector<double> weights_of(const std::vector<MixedSource>& sources) {
  std::vector<double> weights;
  for (const MixedSource& source : sources) weights.push_back(source.weight);
  return weights;
}

}  // namespace

Mixture::Mixture(std::vector<MixedSource> sources)
    : sources_(checked(std::move(sources))), order_(whole_shares(weights_of(sources_))), begins_{0} {
  for (const MixedSource& source : sources_) begins_.push_back(begins_.back() + source.samples->size());
}

uint64_t Mixture::digest() const {
  StreamingHash hash;
  for (size_t i = 0; i < sources_.size(); ++i) {
    const auto share =
        static_cast<uint64_t>(std::llround(order_.share(i) * static_cast<double>(order_.period())));
    for (const uint64_t part : {xxh3(sources_[i].name), share, sources_[i].samples->digest()})
      hash.update(&part, sizeof part);
  }
  return hash.digest();
}

Mixture::Place Mixture::place_of(int64_t index) const {
  const auto end = std::ranges::upper_bound(begins_, index);
  const auto source = static_cast<size_t>(end - begins_.begin()) - 1;
  return {*sources_[source].samples, index - begins_[source]};
}

void Mixture::read(int64_t index, std::span<int64_t> tokens) const {
  const Place place = place_of(index);
  place.samples.read(place.index, tokens);
}

void Mixture::read_targets(int64_t index, std::span<int64_t> tokens, std::span<int64_t> targets) const {
  const Place place = place_of(index);
  place.samples.read_targets(place.index, tokens, targets);
}

bool Mixture::ignores_targets() const {
  return std::ranges::any_of(sources_,
                             [](const MixedSource& source) { return source.samples->ignores_targets(); });
}

int64_t Mixture::kept_targets(int64_t index) const {
  const Place place = place_of(index);
  return place.samples.kept_targets(place.index);
}

std::optional<std::vector<int64_t>> Mixture::document_begins(int64_t index) const {
  const Place place = place_of(index);
  return place.samples.document_begins(place.index);
}

std::optional<int64_t> Mixture::end_token() const {
  const std::optional<int64_t> first = sources_.front().samples->end_token();
  const bool alike = std::ranges::all_of(
      sources_, [&](const MixedSource& source) { return source.samples->end_token() == first; });
  return alike ? first : std::nullopt;
}

std::vector<int64_t> Mixture::order(int64_t begin, int64_t count, uint64_t seed) const {
  std::vector<int64_t> samples;
  samples.reserve(static_cast<size_t>(count));
  for (int64_t position = begin; position < begin + count; ++position) {
    const auto [source, number] = order_.at(position);
    const uint64_t its_seed = mix64(seed, xxh3(sources_[source].name));
    const std::vector<int64_t> one = sources_[source].samples->order(number, 1, its_seed);
    const int64_t size = sources_[source].samples->size();
    if (one.size() != 1 || one[0] < 0 || one[0] >= size) {
      throw DataError("[data.mixture] order({}, 1) of {} has {} entries{}; give one number from 0 to {}",
                      number, sources_[source].name, one.size(),
                      one.empty() ? "" : fmt::format(", the first of which is {}", one[0]), size - 1);
    }
    samples.push_back(begins_[source] + one[0]);
  }
  return samples;
}

double Mixture::epochs(size_t source, int64_t positions) const {
  return static_cast<double>(order_.turns(source, positions)) /
         static_cast<double>(sources_[source].samples->size());
}

}  // namespace trireme::data
