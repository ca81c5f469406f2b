#include "trireme/report/lr_range.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/report/html_check.h"

namespace trireme::report {
namespace {

/// A hundred rates from 1e-7 to 1, with what `loss` says of their logarithms.
template <typename Loss>
Curve over_rates(Loss loss) {
  Curve curve;
  for (int i = 0; i < 100; ++i) {
    const double exponent = -7.0 + 7.0 * i / 99.0;
    curve.add(std::pow(10.0, exponent), loss(exponent));
  }
  return curve;
}

/// Falls from 5 to 2 around 1e-4, and above 1e-2 rises again.
double usual(double exponent) {
  const double fallen = 5.0 - 3.0 / (1.0 + std::exp(-3.0 * (exponent + 4.0)));
  return fallen + (exponent > -2.0 ? 4.0 * (exponent + 2.0) * (exponent + 2.0) : 0.0);
}

TEST(LrRange, FindsWhereALossFallsFastestIsLowestAndIsAboveItsBeginning) {
  const LrRange range = lr_range_of(over_rates(usual));
  ASSERT_TRUE(range.steepest && range.lowest && range.diverged);
  EXPECT_NEAR(std::log10(*range.steepest), -4.0, 0.15);
  EXPECT_NEAR(std::log10(*range.lowest), -2.0, 0.3);
  EXPECT_NEAR(std::log10(*range.diverged), -1.13, 0.15) << "2 + 4 d^2 = 5";
}

TEST(LrRange, IsTheSameWithTheNoiseOfBatches) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> noise(0.0, 0.1);
    const LrRange range = lr_range_of(over_rates([&](double exponent) {
      return 5.0 + (usual(exponent) - 5.0) / 6.0 + noise(random);  // falls by half a nat
    }));
    ASSERT_TRUE(range.steepest && range.lowest && range.diverged) << seed;
    EXPECT_NEAR(std::log10(*range.steepest), -4.0, 1.3) << seed;  // where it falls at all
    EXPECT_NEAR(std::log10(*range.diverged), -0.9, 0.5) << seed;
  }
}

TEST(LrRange, NoiseAloneFallsNowhereAndDoesNotDiverge) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> noise(5.0, 0.2);
    const LrRange range = lr_range_of(over_rates([&](double) { return noise(random); }));
    EXPECT_FALSE(range.steepest || range.lowest || range.diverged) << seed;
  }
}

TEST(LrRange, ALossThatIsNoNumberHasDiverged) {
  const auto explodes = [](double exponent) {
    return exponent > -3.0 ? std::numeric_limits<double>::quiet_NaN() : usual(exponent);
  };
  const LrRange range = lr_range_of(over_rates(explodes));
  ASSERT_TRUE(range.steepest && range.diverged);
  EXPECT_NEAR(std::log10(*range.diverged), -3.0, 0.08);
  EXPECT_LT(*range.steepest, *range.diverged);
  EXPECT_EQ(range.mean.size(), 57u - 2 * 2) << "means are of what is finite";
}

TEST(LrRange, ALossThatOnlyRisesFallsNowhere) {
  const LrRange range = lr_range_of(over_rates([](double exponent) { return 8.0 + exponent; }));
  EXPECT_FALSE(range.steepest || range.lowest);
  EXPECT_TRUE(range.diverged);
  EXPECT_FALSE(lr_range_of({}).steepest);
  Curve bad;
  bad.add(1e-3, std::nan(""));
  EXPECT_EQ(lr_range_of(bad).diverged, 1e-3);
}

TEST(LrRange, PairsLossesWithTheRatesOfTheirSteps) {
  RunRecord run;
  for (int step = 1; step <= 4; ++step) run.metrics.curves["lr"].add(step, step * 0.1);
  for (const int step : {1, 3, 4, 5}) run.metrics.curves["loss"].add(step, 10.0 - step);
  const Curve curve = loss_over_lr(run);
  EXPECT_EQ(curve.x, (std::vector<double>{0.1, 3 * 0.1, 0.4}));
  EXPECT_EQ(curve.y, (std::vector<double>{9.0, 7.0, 6.0}));
}

TEST(LrRange, APageShowsTheCurveOverALogAxisWithItsMarks) {
  const std::string page = lr_range_page(lr_range_of(over_rates(usual)), "runs/find_lr/<x>");
  EXPECT_EQ(HtmlCheck(page).problem(), "");
  for (const char* part : {"falls fastest at ", "lowest at ", "diverged at ", "learning rate",
                           "runs/find_lr/&lt;x&gt;", ">0.001<"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
  EXPECT_EQ(HtmlCheck(lr_range_page({}, "x")).problem(), "");
}

}  // namespace
}  // namespace trireme::report
