// What a model guesses of held-out images is counted once, whichever rank has a row.
#include "trireme/train/guesses.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/comm/mesh.h"
#include "trireme/data/images/codec.h"
#include "trireme/nn/top_k.h"

namespace trireme::train {
namespace {

constexpr int64_t kGuessed = 200, kManyClasses = 7;

/// What a model would make of kGuessed images; three of them are the same bad mistake.
struct GuessedRows {
  at::Tensor logits, targets;
};

GuessedRows guessed_rows() {
  at::manual_seed(11);
  GuessedRows rows{at::randn({kGuessed, kManyClasses}), at::randint(0, kManyClasses, {kGuessed}, at::kLong)};
  rows.targets[3] = rows.logits[3].argmin();
  for (const int64_t row : {17, 150}) {
    rows.logits[row] = rows.logits[3];
    rows.targets[row] = rows.targets[3];
  }
  return rows;
}

void add_rows(Guesses& guesses, const GuessedRows& rows, int64_t begin, int64_t end) {
  std::vector<int64_t> samples(static_cast<size_t>(end - begin));
  std::iota(samples.begin(), samples.end(), begin);
  guesses.add(rows.logits.slice(0, begin, end), rows.targets.slice(0, begin, end), samples);
}

/// Of so many ranks, which take batches in these turns, over and over.
Classification of_ranks(const GuessedRows& rows, int64_t ranks, const std::vector<int64_t>& turns,
                        int64_t batch) {
  Classification of_last;
  test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, ranks));
    Guesses guesses(kManyClasses);
    for (int64_t at = 0, turn = 0; at < kGuessed; at += batch, ++turn) {
      if (turns[static_cast<size_t>(turn % std::ssize(turns))] == world->rank())
        add_rows(guesses, rows, at, std::min(kGuessed, at + batch));
    }
    const Classification all = guesses.of_all_ranks(*mesh.all);
    if (world->rank() + 1 == ranks) of_last = all;
  });
  return of_last;
}

/// All that ranks agree on, as text.
std::string text_of(const Classification& all) {
  std::string text = fmt::format("{} images, {} right, {} not finite: {}\n", all.images, all.right,
                                 all.not_finite, fmt::join(all.confusion, " "));
  for (const Classification::Mistake& one : all.worst)
    text += fmt::format("{}: {} for {}, {:.5f} {:.5f} {:.5f}\n", one.sample, one.guess, one.truth, one.loss,
                        one.guess_probability, one.truth_probability);
  return text;
}

TEST(Guesses, CountEachRowByItsTrueAndItsLikeliestClass) {
  const GuessedRows rows = guessed_rows();
  const Classification all = of_ranks(rows, 1, {0}, kGuessed);
  EXPECT_EQ(all.images, kGuessed);
  EXPECT_EQ(all.right, nn::top_k_hits(rows.logits, rows.targets, 1).item<int64_t>());
  std::vector<int64_t> expected(kManyClasses * kManyClasses, 0);
  const at::Tensor likeliest = std::get<1>(rows.logits.sort(1, /*descending=*/true)).select(1, 0);
  for (int64_t row = 0; row < kGuessed; ++row)
    ++expected[static_cast<size_t>(rows.targets[row].item<int64_t>() * kManyClasses +
                                   likeliest[row].item<int64_t>())];
  EXPECT_EQ(all.confusion, expected);
}

TEST(Guesses, TheWorstAreTheMistakesOfTheLargestLoss) {
  const GuessedRows rows = guessed_rows();
  const Classification all = of_ranks(rows, 1, {0}, 64);
  const at::Tensor probabilities = at::softmax(rows.logits.to(at::kDouble), 1);
  std::vector<std::pair<double, int64_t>> mistakes;
  for (int64_t row = 0; row < kGuessed; ++row) {
    const int64_t truth = rows.targets[row].item<int64_t>();
    if (probabilities[row].argmax().item<int64_t>() != truth)
      mistakes.emplace_back(std::log(probabilities[row][truth].item<double>()), row);
  }
  std::ranges::sort(mistakes);
  ASSERT_GT(std::ssize(mistakes), Guesses::kMostMistakes);
  ASSERT_EQ(std::ssize(all.worst), Guesses::kMostMistakes);
  for (size_t i = 0; i < all.worst.size(); ++i) {
    const Classification::Mistake& one = all.worst[i];
    EXPECT_EQ(one.sample, mistakes[i].second) << i << ": of equal losses the earlier sample comes first";
    EXPECT_NEAR(one.loss, -mistakes[i].first, 1e-9);
    EXPECT_NEAR(one.truth_probability, std::exp(mistakes[i].first), 1e-9);
    EXPECT_NEAR(one.guess_probability, probabilities[one.sample].max().item<double>(), 1e-9);
    EXPECT_EQ(one.truth, rows.targets[one.sample].item<int64_t>());
  }
}

TEST(Guesses, AreTheSameOnAnyNumberOfRanks) {
  const GuessedRows rows = guessed_rows();
  const std::string alone = text_of(of_ranks(rows, 1, {0}, kGuessed));
  struct Case {
    int64_t ranks;
    std::vector<int64_t> turns;
    int64_t batch;
  };
  for (const auto& [ranks, turns, batch] : std::vector<Case>{
           {1, {0}, 1}, {2, {1, 0}, 40}, {3, {2, 1, 0}, 7}, {3, {1}, 25}, {4, {3, 0, 0, 2}, 3}}) {
    EXPECT_EQ(text_of(of_ranks(rows, ranks, turns, batch)), alone) << ranks << " ranks, batches of " << batch;
  }
}

TEST(Guesses, OfEqualLogitsTheFirstClassIsMeant) {
  Guesses guesses(3);
  guesses.add(at::zeros({3, 3}), at::arange(3), {0, 1, 2});
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 1));
    const Classification all = guesses.of_all_ranks(*mesh.all);
    EXPECT_EQ(all.confusion, (std::vector<int64_t>{1, 0, 0, 1, 0, 0, 1, 0, 0}));
    EXPECT_EQ(all.right, nn::top_k_hits(at::zeros({3, 3}), at::arange(3), 1).item<int64_t>());
    ASSERT_EQ(all.worst.size(), 2U);
    EXPECT_EQ(all.worst[0].sample, 1) << "of equal losses the earlier";
  });
}

TEST(Guesses, LogitsThatAreNotFiniteAreNoGuess) {
  Guesses guesses(2);
  at::Tensor logits = at::zeros({4, 2});
  logits[1][0] = std::numeric_limits<float>::quiet_NaN();
  logits[2][1] = std::numeric_limits<float>::infinity();
  logits[3][0] = -std::numeric_limits<float>::infinity();
  guesses.add(logits, at::zeros({4}, at::kLong), {0, 1, 2, 3});
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 1));
    const Classification all = guesses.of_all_ranks(*mesh.all);
    EXPECT_EQ(all.images, 4);
    EXPECT_EQ(all.not_finite, 2);
    EXPECT_EQ(all.confusion, (std::vector<int64_t>{1, 1, 0, 0})) << "a class with no chance at all is one";
    ASSERT_EQ(all.worst.size(), 1U);
    EXPECT_TRUE(std::isinf(all.worst[0].loss));
    EXPECT_EQ(all.worst[0].truth_probability, 0.0);
  });
}

TEST(Guesses, OfTooManyClassesHaveNoMatrix) {
  constexpr int64_t kClasses = Guesses::kMostClasses + 1;
  Guesses guesses(kClasses);
  const at::Tensor logits = at::zeros({2, kClasses});
  logits[0][kClasses - 1] = 9.0;
  logits[1][5] = 9.0;
  guesses.add(logits, at::full({2}, kClasses - 1, at::kLong), {8, 9});
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 1));
    const Classification all = guesses.of_all_ranks(*mesh.all);
    EXPECT_TRUE(all.confusion.empty());
    EXPECT_EQ(all.right, 1);
    ASSERT_EQ(all.worst.size(), 1U);
    EXPECT_EQ(all.worst[0].guess, 5);
  });
}

/// Two classes, of whose held-out pictures the fourth cannot be read.
class TornPictures : public RunData {
 public:
  std::string description() const override { return "torn"; }
  Sizes sizes() const override { return {0, 9}; }
  std::string counted() const override { return "images"; }
  void check_fits(const plan::ModelConfig&) const override {}
  int64_t samples() const override { return 0; }
  uint64_t digest() const override { return 0; }
  Feed feed(const FeedOptions&) const override { return {}; }
  int64_t val_samples() const override { return 9; }
  ValidationFeed validation(int64_t, const FeedOptions&) const override { return {}; }
  std::vector<std::string> classes() const override { return {"cat", "dog"}; }
  std::string held_out_name(int64_t sample) const override { return fmt::format("{}.png", sample); }
  Picture held_out_picture(int64_t sample) const override {
    if (sample == 4) throw data::BrokenImage("torn");
    return {.width = 1, .height = 1, .channels = 1, .pixels = {static_cast<uint8_t>(sample)}};
  }
};

TEST(Guesses, AreDescribedWithThePicturesThatCanBeRead) {
  Classification all;
  for (const int64_t sample : {7, 4, 2}) {
    all.worst.emplace_back();
    all.worst.back().sample = sample;
  }
  describe(all, TornPictures());
  EXPECT_EQ(all.classes, (std::vector<std::string>{"cat", "dog"}));
  EXPECT_EQ(all.worst[1].name, "4.png");
  EXPECT_TRUE(all.worst[1].picture.pixels.empty());
  EXPECT_EQ(all.worst[0].picture.pixels, std::vector<uint8_t>{7});
  EXPECT_EQ(all.worst[2].picture.pixels, std::vector<uint8_t>{2});
}

}  // namespace
}  // namespace trireme::train
