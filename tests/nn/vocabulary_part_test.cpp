// A vocabulary in parts gives the loss and the gradients of the whole.
#include "trireme/nn/vocabulary_part.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/nn/vocabulary_cases.h"
#include "tests/support/nan_memory.h"
#include "tests/support/refusal.h"
#include "tests/support/relative_error.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/loss.h"
#include "trireme/plan/spread_head.h"

namespace trireme::nn {
namespace {

constexpr int64_t kTokens = 12, kWidth = 8, kVocabulary = 37;

HeadCase case_of(at::ScalarType dtype, double size = 1.0) {
  at::manual_seed(5);
  return {(at::randn({3, 4, kWidth}) * size).to(dtype), at::randn({kVocabulary, kWidth}).to(dtype),
          at::randint(kVocabulary, {3, 4}, at::kLong)};
}

TEST(VocabularyPart, GivesTheLossAndTheGradientsOfTheWhole) {
  for (const auto& first :
       {std::vector<int64_t>{0, kVocabulary}, {0, 19, kVocabulary}, {0, 1, 20, 36, kVocabulary}}) {
    for (const bool ignores : {false, true}) {
      for (const int64_t chunk_bytes : {int64_t{1}, int64_t{1000}, kLossChunkBytes}) {
        HeadCase given = case_of(at::kFloat);
        if (ignores) given.targets.narrow(1, 0, 2).fill_(-100);
        const HeadOutcome wanted = in_one_piece(given, 0.25), got = in_parts(given, first, 0.25, chunk_bytes);
        const std::string what =
            fmt::format("{} parts, ignores {}, {} bytes", first.size() - 1, ignores, chunk_bytes);
        EXPECT_NEAR(got.loss.item<double>(), wanted.loss.item<double>(), 1e-6) << what;
        EXPECT_LE(test::relative_error(got.d_x, wanted.d_x), 1e-6) << what;
        EXPECT_LE(test::relative_error(got.d_weight, wanted.d_weight), 1e-6) << what;
      }
    }
  }
}

/// As torch has it, and the kernel for a vocabulary in one piece.
TEST(VocabularyPart, IgnoredTokensCountForNothingWhateverTheirLogitsAre) {
  HeadCase given = case_of(at::kFloat), finite = case_of(at::kFloat);
  for (HeadCase* each : {&given, &finite}) each->targets.narrow(1, 0, 2).fill_(-100);
  given.x.narrow(1, 0, 1).fill_(3e38);  // logits of infinity and NaN
  finite.x.narrow(1, 0, 1).fill_(1.0);
  const HeadOutcome got = in_parts(given, {0, 19, kVocabulary}, 0.25),
                    wanted = in_parts(finite, {0, 19, kVocabulary}, 0.25);
  EXPECT_FALSE(at::matmul(given.x, given.weight.t()).isfinite().all().item<bool>());
  EXPECT_TRUE(at::equal(got.loss, wanted.loss));
  EXPECT_TRUE(at::equal(got.d_x, wanted.d_x));
  EXPECT_TRUE(at::equal(got.d_weight, wanted.d_weight));
  EXPECT_EQ(got.d_x.narrow(1, 0, 2).abs().max().item<double>(), 0.0);
}

/// Logits of several hundreds: the target is nearly all of the sum, and what is left of the gradient small.
TEST(VocabularyPart, StaysExactWhereTheModelIsSure) {
  HeadCase given = case_of(at::kFloat, 100.0);
  given.targets = at::matmul(given.x, given.weight.t()).argmax(-1);
  const HeadOutcome wanted = in_one_piece(given, 1.0), got = in_parts(given, {0, 10, kVocabulary}, 1.0);
  EXPECT_NEAR(got.loss.item<double>(), wanted.loss.item<double>(), 1e-4);
  EXPECT_LE((got.d_x.to(at::kDouble) - wanted.d_x).abs().max().item<double>(), 1e-5);
  EXPECT_LE((got.d_weight.to(at::kDouble) - wanted.d_weight).abs().max().item<double>(), 1e-4);
}

TEST(VocabularyPart, RoundsInBf16AsTheWholeDoes) {
  const HeadCase given = case_of(at::kBFloat16);
  const HeadOutcome wanted = in_one_piece(given, 1.0), got = in_parts(given, {0, 16, kVocabulary}, 1.0);
  EXPECT_EQ(got.d_x.scalar_type(), at::kBFloat16);
  EXPECT_NEAR(got.loss.item<double>(), wanted.loss.item<double>(), 2e-2 * wanted.loss.item<double>());
  EXPECT_LE(test::relative_error(got.d_x, wanted.d_x), 1e-2);
  EXPECT_LE(test::relative_error(got.d_weight, wanted.d_weight), 1e-2);
}

TEST(VocabularyPart, AddsToAGradientAndKnowsTheLossWithoutOne) {
  const HeadCase given = case_of(at::kFloat);
  const at::Tensor weight = given.weight.clone().requires_grad_(true);
  for (int i = 0; i < 2; ++i) {
    const VocabularyPart part = vocabulary_part(given.x, weight, 0, {.targets = given.targets});
    part.stats.backward(join_vocabulary({part.message}, given.targets, kWidth, 1.0).totals);
  }
  const HeadOutcome wanted = in_one_piece(given, 1.0);
  EXPECT_LE(test::relative_error(weight.grad() / 2, wanted.d_weight), 1e-6);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> stats;
  for (const auto& [first, rows] : {std::pair<int64_t, int64_t>{0, 20}, {20, 17}}) {
    const VocabularyPart part =
        vocabulary_part(given.x, given.weight.narrow(0, first, rows), first, {.targets = given.targets});
    EXPECT_FALSE(part.message.defined());
    stats.push_back(part.stats);
  }
  EXPECT_NEAR(joined_loss(at::stack(stats), given.targets).item<double>(), wanted.loss.item<double>(), 1e-6);
}

TEST(VocabularyPart, NoTokensHaveGradientsOfZero) {
  const test::NanMemory nan_memory;
  ASSERT_TRUE(at::empty({4}).isnan().all().item<bool>());
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    HeadCase given = case_of(dtype);
    given.x = given.x.narrow(0, 0, 0);
    given.targets = given.targets.narrow(0, 0, 0);
    const HeadOutcome got = in_parts(given, {0, 19, kVocabulary}, 0.25);
    EXPECT_TRUE(got.loss.isnan().item<bool>()) << "a mean over no rows";
    EXPECT_EQ(got.d_x.numel(), 0);
    EXPECT_TRUE(at::equal(got.d_weight, at::zeros_like(given.weight))) << c10::toString(dtype);
  }
}

TEST(VocabularyPart, RefusesTargetsThatNoPartHas) {
  HeadCase given = case_of(at::kFloat);
  given.targets[1][1] = kVocabulary;
  test::expect_refusal(
      [&] {
        in_parts(given, {0, 20, kVocabulary}, 1.0);
      },
      {"the target of row 5 is 37", "no part of the vocabulary"});
  given.targets = given.targets.narrow(1, 0, 3);
  test::expect_refusal([&] { in_parts(given, {0, kVocabulary}, 1.0); }, {"12 tokens, 9 targets"});
}

/// A run that diverges says that its numbers are not finite, and not that its data are damaged.
TEST(VocabularyPart, ATargetWhoseLogitIsNegativeInfinityHasNoFiniteLoss) {
  HeadCase given = case_of(at::kFloat);
  given.x.fill_(1e30);
  given.weight.fill_(1.0);
  given.weight[3].fill_(-1e30);
  given.targets.fill_(3);
  const HeadOutcome got = in_parts(given, {0, 20, kVocabulary}, 1.0);
  EXPECT_FALSE(got.loss.isfinite().item<bool>());
  EXPECT_FALSE(got.d_x.isfinite().any().item<bool>());
}

TEST(VocabularyPart, IsAsLargeAsPlanned) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const HeadCase given = case_of(dtype);
    const at::Tensor weight = given.weight.clone().requires_grad_(true);
    const VocabularyPart part = vocabulary_part(given.x, weight, 0, {.targets = given.targets});
    const plan::HeadPartBytes planned =
        plan::head_part_bytes(kTokens, kVocabulary, kWidth, static_cast<int64_t>(weight.element_size()));
    EXPECT_EQ(static_cast<int64_t>(part.message.nbytes()), planned.part);
    EXPECT_EQ(
        static_cast<int64_t>(join_vocabulary({part.message}, given.targets, kWidth, 1.0).totals.nbytes()),
        planned.totals);
  }
}

}  // namespace
}  // namespace trireme::nn
