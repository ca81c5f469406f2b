// Mixtures: shares, and an order that is a function of the position alone.
#include "trireme/data/mixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "trireme/base/error.h"

namespace trireme::data {
namespace {

/// Sample i of source s is all tokens 1000 s + i.
class Marked : public TokenSamples {
 public:
  Marked(int64_t mark, int64_t size, int64_t seq_len = 4) : mark_(mark), size_(size), seq_len_(seq_len) {}
  int64_t size() const override { return size_; }
  int64_t seq_len() const override { return seq_len_; }
  uint64_t digest() const override { return static_cast<uint64_t>(1000 * mark_ + size_); }
  void read(int64_t index, std::span<int64_t> tokens) const override {
    std::ranges::fill(tokens, 1000 * mark_ + index);
  }

 private:
  int64_t mark_, size_, seq_len_;
};

MixedSource marked(const std::string& name, double weight, int64_t mark, int64_t size) {
  return {name, weight, std::make_shared<Marked>(mark, size)};
}

Mixture three() {
  return Mixture({marked("code", 7, 0, 13), marked("talk", 2, 1, 5), marked("web", 1, 2, 50)});
}

TEST(Mixture, SharesAreExactWhereWeightsHaveACommonDenominator) {
  EXPECT_EQ(whole_shares({0.7, 0.2, 0.1}), (std::vector<int64_t>{7, 2, 1}));
  EXPECT_EQ(whole_shares({2, 4}), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(whole_shares({0.0625, 3}), (std::vector<int64_t>{1, 48}));
  EXPECT_EQ(whole_shares({1e9, 2e9}), (std::vector<int64_t>{1, 2}));
  const std::vector<int64_t> rounded = whole_shares({1.0 / 3, std::sqrt(2.0), 1e-3});
  EXPECT_EQ(std::accumulate(rounded.begin(), rounded.end(), int64_t{0}), kLongestPeriod);
  const double sum = 1.0 / 3 + std::sqrt(2.0) + 1e-3;
  EXPECT_NEAR(static_cast<double>(rounded[1]), std::sqrt(2.0) / sum * kLongestPeriod, 1.0);
}

TEST(Mixture, RefusesWeightsThatAreNone) {
  for (const double weight : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()})
    EXPECT_THROW(whole_shares({1.0, weight}), ConfigError) << weight;
  EXPECT_THROW(whole_shares({1.0, 1e-9}), ConfigError);
}

/// The law: of the first n positions, for every n, each source has its share but for less than one.
TEST(Mixture, EachSourceHasItsShareOfEveryBeginning) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> shares(1 + random() % 7);
    for (int64_t& share : shares) share = 1 + static_cast<int64_t>(random() % (round % 3 == 0 ? 3 : 200));
    const SourceOrder order(shares);
    const int64_t period = std::accumulate(shares.begin(), shares.end(), int64_t{0});
    ASSERT_EQ(order.period(), period);
    std::vector<int64_t> taken(shares.size(), 0);
    for (int64_t n = 1; n <= 2 * period + 3; ++n) {
      const auto turn = order.at(n - 1);
      ASSERT_EQ(turn.number, taken[turn.source]++) << "a turn was left out or taken twice";
      for (size_t source = 0; source < shares.size(); ++source) {
        const double exact = static_cast<double>(n * shares[source]) / static_cast<double>(period);
        ASSERT_LT(std::fabs(static_cast<double>(taken[source]) - exact), 1.0) << n;
      }
    }
    for (size_t source = 0; source < shares.size(); ++source)
      EXPECT_EQ(order.turns(source, 2 * period + 3), taken[source]);
  }
}

TEST(Mixture, GoesThroughEachSourceOnceAnEpoch) {
  const Mixture mixture = three();
  ASSERT_EQ(mixture.size(), 68);
  const std::vector<int64_t> order = mixture.order(0, 2000, 42);
  std::vector<std::vector<int64_t>> by_source(3);
  std::vector<int64_t> tokens(5);
  for (const int64_t sample : order) {
    mixture.read(sample, tokens);
    EXPECT_EQ(std::ranges::count(tokens, tokens[0]), 5);
    by_source[static_cast<size_t>(tokens[0] / 1000)].push_back(tokens[0] % 1000);
  }
  for (size_t source = 0; source < 3; ++source) {
    const auto size = static_cast<size_t>(mixture.sources()[source].samples->size());
    const std::vector<int64_t>& read = by_source[source];
    EXPECT_DOUBLE_EQ(mixture.epochs(source, 2000),
                     static_cast<double>(read.size()) / static_cast<double>(size));
    std::vector<int64_t> first, second;
    for (size_t begin = 0; begin + size <= read.size(); begin += size) {
      std::vector<int64_t> epoch(read.begin() + static_cast<int64_t>(begin),
                                 read.begin() + static_cast<int64_t>(begin + size));
      (begin == 0 ? first : second) = epoch;
      std::ranges::sort(epoch);
      for (size_t i = 0; i < size; ++i) ASSERT_EQ(epoch[i], static_cast<int64_t>(i)) << source;
    }
  }
}

/// Resumed runs and other numbers of ranks read pieces: any piece of the order is that piece.
TEST(Mixture, TheOrderIsAFunctionOfThePosition) {
  const Mixture mixture = three();
  const std::vector<int64_t> whole = mixture.order(0, 96, 7);
  for (const int64_t ranks : {1, 2, 3, 4}) {
    std::vector<int64_t> pieces;
    for (int64_t step = 0; step < 8; ++step) {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto piece = mixture.order(12 * step + 12 / ranks * rank, 12 / ranks, 7);
        pieces.insert(pieces.end(), piece.begin(), piece.end());
      }
    }
    EXPECT_EQ(pieces, whole) << ranks;
  }
  EXPECT_NE(mixture.order(0, 96, 8), whole);
}

/// The shares of a mixture hold inside another one.
TEST(Mixture, MayBeASourceOfAnother) {
  const auto inner =
      std::make_shared<Mixture>(std::vector<MixedSource>{marked("x", 3, 0, 40), marked("y", 1, 1, 40)});
  const Mixture outer({{"xy", 1.0, inner}, marked("z", 1, 2, 40)});
  std::vector<int64_t> tokens(5), taken(3, 0);
  for (const int64_t sample : outer.order(0, 80, 42)) {
    outer.read(sample, tokens);
    ++taken[static_cast<size_t>(tokens[0] / 1000)];
  }
  EXPECT_EQ(taken, (std::vector<int64_t>{30, 10, 40}));
}

TEST(Mixture, AnOrderThatNamesNoSampleOfItsSourceIsNamed) {
  struct Lost : Marked {
    using Marked::Marked;
    std::vector<int64_t> order(int64_t, int64_t, uint64_t) const override { return {9}; }
  };
  const Mixture mixture({marked("good", 1, 0, 9), {"lost", 1.0, std::make_shared<Lost>(1, 9)}});
  try {
    mixture.order(0, 4, 42);
    ADD_FAILURE() << "sample 9 of 9 was read";
  } catch (const DataError& error) {
    EXPECT_NE(std::string(error.what()).find("of lost has 1 entries, the first of which is 9"),
              std::string::npos)
        << error.what();
  }
}

TEST(Mixture, OtherSourcesNamesAndSharesHaveAnotherDigest) {
  const auto digest = [](const MixedSource& a, const MixedSource& b) { return Mixture({a, b}).digest(); };
  const MixedSource a = marked("a", 1, 0, 9), b = marked("b", 2, 1, 9);
  const uint64_t first = digest(a, b);
  EXPECT_EQ(digest(marked("a", 0.5, 0, 9), marked("b", 1, 1, 9)), first) << "the same shares";
  EXPECT_NE(digest(marked("a", 2, 0, 9), b), first);
  EXPECT_NE(digest(marked("c", 1, 0, 9), b), first);
  EXPECT_NE(digest(marked("a", 1, 0, 8), b), first);
}

TEST(Mixture, RefusesSourcesThatAreNone) {
  const MixedSource good = marked("a", 1, 0, 9);
  EXPECT_THROW(Mixture({}), ConfigError);
  EXPECT_THROW(Mixture({good, good}), ConfigError);
  EXPECT_THROW(Mixture({good, marked("", 1, 0, 9)}), ConfigError);
  EXPECT_THROW(Mixture({good, marked("b", 1, 0, 0)}), ConfigError);
  EXPECT_THROW(Mixture({good, marked("b", 0, 0, 9)}), ConfigError);
  EXPECT_THROW(Mixture({good, {"b", 1.0, nullptr}}), ConfigError);
  EXPECT_THROW(Mixture({good, {"b", 1.0, std::make_shared<Marked>(1, 9, 5)}}), ConfigError);
}

}  // namespace
}  // namespace trireme::data
