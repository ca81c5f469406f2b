// The kernels of a vocabulary in parts, against the whole in double. Skipped without a GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "tests/nn/vocabulary_cases.h"
#include "tests/support/relative_error.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/tensor_ops.h"

namespace trireme::nn {
namespace {

class GpuVocabularyPart : public testing::Test {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
    at::manual_seed(5);
  }
  /// 33 tokens; rows of logits and features that are multiples of 16 bytes, or not.
  static HeadCase case_of(at::ScalarType dtype, int64_t width, int64_t vocabulary, double size = 1.0) {
    const auto options = at::TensorOptions(at::kCUDA);
    return {(at::randn({3, 11, width}, options) * size).to(dtype),
            (at::randn({vocabulary, width}, options) / std::sqrt(static_cast<double>(width))).to(dtype),
            at::randint(vocabulary, {3, 11}, options.dtype(at::kLong))};
  }
};

TEST_F(GpuVocabularyPart, GivesTheLossAndTheGradientsOfTheWhole) {
  struct Bounds {
    at::ScalarType dtype;
    double loss, gradient;
  };
  for (const auto& [dtype, loss_bound, bound] :
       {Bounds{at::kFloat, 2e-6, 3e-6}, {at::kBFloat16, 3e-3, 1e-2}, {at::kHalf, 1e-3, 2e-3}}) {
    for (const auto& [width, vocabulary] : {std::pair<int64_t, int64_t>{64, 5120}, {24, 1037}, {7, 70'001}}) {
      for (const auto& first : {std::vector<int64_t>{0, vocabulary}, {0, 512, 1024, vocabulary}}) {
        for (const bool ignores : {false, true}) {
          for (const int64_t chunk_bytes : {int64_t{50'000}, kLossChunkBytes}) {
            HeadCase given = case_of(dtype, width, vocabulary);
            if (ignores) given.targets.narrow(1, 0, 4).fill_(-100);
            const HeadOutcome wanted = in_one_piece(given, 0.25),
                              got = in_parts(given, first, 0.25, chunk_bytes);
            const std::string what =
                fmt::format("{} width {} vocabulary {} parts {} ignores {} chunk {}", c10::toString(dtype),
                            width, vocabulary, first.size() - 1, ignores, chunk_bytes);
            const double loss = wanted.loss.item<double>();
            EXPECT_NEAR(got.loss.item<double>(), loss, loss_bound * loss) << what;
            EXPECT_LE(test::relative_error(got.d_x, wanted.d_x), bound) << what;
            EXPECT_LE(test::relative_error(got.d_weight, wanted.d_weight), bound) << what;
          }
        }
      }
    }
  }
}

/// The loss of ranks along tp needs no more memory than its logits.
TEST_F(GpuVocabularyPart, GradientsMayLieWhereTheLogitsWere) {
  constexpr int64_t kRows = 70, kFirst = 100;
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t words : {int64_t{1}, int64_t{1000}, int64_t{1024}, int64_t{33'333}}) {
      const at::Tensor logits = at::randn({kRows, words}, at::TensorOptions(dtype).device(at::kCUDA));
      const at::Tensor targets =
          at::arange(kRows, at::TensorOptions(at::kLong).device(at::kCUDA)).mul(words).floor_divide(50) + 80;
      const at::Tensor exact = logits.to(at::kFloat);
      at::Tensor totals = at::stack({exact.amax(1), exact.exp().sum(1), at::ones({kRows}, exact.options())});
      totals[2][3].zero_();
      at::Tensor apart = at::empty_like(logits), over = logits.clone();
      kernels::vocabulary_part_gradient(apart, logits, targets, kFirst, totals);
      kernels::vocabulary_part_gradient(over, over, targets, kFirst, totals);
      EXPECT_TRUE(at::equal(over, apart)) << c10::toString(dtype) << ", " << words << " words";
      EXPECT_GT(apart.abs().sum().item<double>(), 0.0);
    }
  }
}

TEST_F(GpuVocabularyPart, IgnoredTokensCountForNothingWhateverTheirLogitsAre) {
  HeadCase given = case_of(at::kBFloat16, 64, 1024);
  given.targets.narrow(1, 0, 4).fill_(-100);
  HeadCase finite = given;
  finite.x = given.x.clone();
  given.x.narrow(1, 0, 1).fill_(3e38);  // logits of infinity and NaN
  finite.x.narrow(1, 0, 1).fill_(1.0);
  const HeadOutcome got = in_parts(given, {0, 512, 1024}, 0.25),
                    wanted = in_parts(finite, {0, 512, 1024}, 0.25);
  EXPECT_TRUE(at::equal(got.loss, wanted.loss));
  EXPECT_TRUE(at::equal(got.d_x, wanted.d_x));
  EXPECT_EQ(got.d_x.narrow(1, 0, 4).abs().max().item<double>(), 0.0);
}

/// The target is nearly all of the sum, and what is left of the gradient small.
TEST_F(GpuVocabularyPart, StaysExactWhereTheModelIsSure) {
  HeadCase given = case_of(at::kFloat, 64, 1024, 100.0);
  given.targets = at::matmul(given.x, given.weight.t()).argmax(-1);
  const HeadOutcome wanted = in_one_piece(given, 1.0), got = in_parts(given, {0, 512, 1024}, 1.0);
  EXPECT_LE((got.d_x.to(at::kDouble) - wanted.d_x).abs().max().item<double>(), 1e-5);
  // Sums of features of several hundreds, each with the rounding of fp32.
  EXPECT_LE((got.d_weight.to(at::kDouble) - wanted.d_weight).abs().max().item<double>(), 5e-4);
}

TEST_F(GpuVocabularyPart, ATargetThatNoPartHasMakesTheLossInfinite) {
  HeadCase given = case_of(at::kBFloat16, 64, 1024);
  given.targets[1][1] = 1024;
  EXPECT_FALSE(in_parts(given, {0, 512, 1024}, 1.0).loss.isfinite().item<bool>());
}

}  // namespace
}  // namespace trireme::nn
