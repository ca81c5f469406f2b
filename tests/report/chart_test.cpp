#include "trireme/report/chart.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/report/html_check.h"
#include "trireme/report/page_parts.h"

namespace trireme::report {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Labels = std::vector<std::string>;

Labels labels_of(double low, double high, const AxisOptions& options) {
  return make_axis(low, high, options).labels;
}

TEST(Axis, HasRoundNumbersInTheUnitOfItsValues) {
  EXPECT_EQ(labels_of(0.0, 10.0, {}), (Labels{"0", "2", "4", "6", "8", "10"}));
  EXPECT_EQ(labels_of(1.0, 400.0, {.unit = Unit::kCount, .round_ends = false}),
            (Labels{"100", "200", "300", "400"}));
  EXPECT_EQ(labels_of(0.0, 23456.0, {.unit = Unit::kCount}), (Labels{"0", "5k", "10k", "15k", "20k", "25k"}));
  EXPECT_EQ(labels_of(0.0, 0.37, {.unit = Unit::kShare}), (Labels{"0%", "10%", "20%", "30%", "40%"}));
  const Axis memory = make_axis(0.0, 3.2 * 1024 * 1024, {.unit = Unit::kBytes});
  EXPECT_EQ(memory.suffix, "MiB");
  EXPECT_EQ(memory.labels, (Labels{"0", "1", "2", "3", "4"}));
  EXPECT_EQ(memory.ticks[1], 1024.0 * 1024.0) << "round in MiB, not in bytes";
  EXPECT_EQ(make_axis(0.0, 25000.0, {.unit = Unit::kMilliseconds}).suffix, "s");
}

TEST(Axis, HoldsItsValuesWithAFewEvenTicks) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponent(-12.0, 12.0), share(-1.0, 1.0);
  for (int i = 0; i < 2000; ++i) {
    const double size = std::pow(10.0, exponent(random));
    const double a = size * share(random), b = size * share(random);
    const Axis axis = make_axis(std::min(a, b), std::max(a, b), {});
    ASSERT_LE(axis.low, std::min(a, b) + 1e-9 * size);
    ASSERT_GE(axis.high, std::max(a, b) - 1e-9 * size);
    ASSERT_GE(axis.ticks.size(), 2u) << a << " " << b;
    ASSERT_LE(axis.ticks.size(), 8u) << a << " " << b;
    const double step = axis.ticks[1] - axis.ticks[0];
    const double digit = step / std::pow(10.0, std::floor(std::log10(step * (1.0 + 1e-9))));
    EXPECT_TRUE(std::fabs(digit - 1.0) < 1e-6 || std::fabs(digit - 2.0) < 1e-6 ||
                std::fabs(digit - 5.0) < 1e-6)
        << step;
    for (size_t j = 1; j < axis.ticks.size(); ++j)
      EXPECT_NEAR(axis.ticks[j] - axis.ticks[j - 1], step, 1e-6 * step + 1e-12 * std::fabs(axis.ticks[j]));
  }
}

TEST(Axis, OfLogsHasPowersOfTenAndPlacesThemEvenly) {
  const Axis axis = make_axis(0.001, 1000.0, {.log = true, .most_ticks = 8});
  EXPECT_EQ(axis.labels, (Labels{"0.001", "0.01", "0.1", "1", "10", "100", "1000"}));
  for (size_t i = 0; i < axis.ticks.size(); ++i)
    EXPECT_NEAR(axis.place(axis.ticks[i]), static_cast<double>(i) / 6.0, 1e-9);
  EXPECT_EQ(labels_of(0.9, 60.0, {.log = true}), (Labels{"1", "2", "5", "10", "20", "50"}));
  EXPECT_LE(labels_of(1e-300, 1e300, {.log = true}).size(), 7u);
}

TEST(Axis, OfOneValueHasRoomAroundIt) {
  for (const double value : {0.0, 3e-4, -5.0, 1e20}) {
    const Axis axis = make_axis(value, value, {});
    EXPECT_LT(axis.low, axis.high) << value;
    EXPECT_GT(axis.place(value), 0.0) << value;
    EXPECT_LT(axis.place(value), 1.0) << value;
  }
  EXPECT_NEAR(make_axis(7.0, 7.0, {.log = true}).place(7.0), 0.5, 1e-9);
}

TEST(Axis, OfSharesEndsAtAll) {
  EXPECT_EQ(labels_of(1.0, 1.0, {.unit = Unit::kShare}).back(), "100%");
  EXPECT_EQ(make_axis(1.0, 1.0, {.unit = Unit::kShare}).high, 1.0);
  EXPECT_EQ(make_axis(0.97, 1.0, {.unit = Unit::kShare}).high, 1.0);
  EXPECT_EQ(make_axis(0.0, 0.0, {.unit = Unit::kShare}).low, 0.0);
  EXPECT_GT(make_axis(1.0, 1.2, {.unit = Unit::kShare}).high, 1.1) << "a share of more than all is shown";
}

TEST(Axis, OfCountsHasNoFractions) {
  EXPECT_EQ(labels_of(1.0, 1.0, {.unit = Unit::kCount, .round_ends = false}), (Labels{"1"}));
  EXPECT_EQ(labels_of(1.0, 3.0, {.unit = Unit::kCount, .round_ends = false}), (Labels{"1", "2", "3"}));
}

Curve noise(size_t points) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> value;
  Curve curve;
  for (size_t i = 0; i < points; ++i) curve.add(static_cast<double>(i + 1), value(random));
  return curve;
}

TEST(Bins, OfFewPointsAreThePoints) {
  const std::vector<Bin> bins = bins_of(noise(100), 100);
  ASSERT_EQ(bins.size(), 100u);
  for (const Bin& bin : bins) {
    EXPECT_EQ(bin.first, bin.last);
    EXPECT_EQ(bin.low, bin.high);
    EXPECT_EQ(bin.count, 1);
  }
  EXPECT_TRUE(bins_of({}, 10).empty());
}

TEST(Bins, OfAMillionPointsLoseNoSpike) {
  Curve curve = noise(1'000'000);
  curve.y[123'456] = 1e6;
  curve.y[654'321] = -1e6;
  curve.y[777'777] = kNaN;
  const std::vector<Bin> bins = bins_of(curve, 240);
  ASSERT_EQ(bins.size(), 240u);
  int64_t count = 0, not_finite = 0;
  double sum = 0.0;
  for (size_t i = 0; i < bins.size(); ++i) {
    count += bins[i].count;
    not_finite += bins[i].not_finite;
    sum += bins[i].mean * static_cast<double>(bins[i].count);
    EXPECT_LE(bins[i].low, bins[i].mean);
    EXPECT_LE(bins[i].mean, bins[i].high);
    EXPECT_EQ(bins[i].first, i == 0 ? 1.0 : bins[i - 1].last + 1.0) << "every point is in one bin";
  }
  EXPECT_EQ(count, 999'999);
  EXPECT_EQ(not_finite, 1);
  EXPECT_EQ(std::ranges::max(bins, {}, &Bin::high).high, 1e6);
  EXPECT_EQ(std::ranges::min(bins, {}, &Bin::low).low, -1e6);
  double expected = 0.0;
  for (const double value : curve.y) expected += std::isfinite(value) ? value : 0.0;
  EXPECT_NEAR(sum, expected, 1e-4);
}

TEST(Bins, AQuantileLiesBetweenItsNeighbours) {
  EXPECT_EQ(quantile({3.0, 1.0, 2.0}, 0.5), 2.0);
  EXPECT_EQ(quantile({4.0, 1.0, 2.0, 3.0}, 0.5), 2.5);
  EXPECT_EQ(quantile({1.0, kNaN, 3.0, kInfinity}, 1.0), 3.0);
  EXPECT_NEAR(*quantile({0.0, 10.0}, 0.95), 9.5, 1e-12);
  EXPECT_FALSE(quantile({kNaN}, 0.5));
}

/// How often `part` is in the drawn chart, which must be well-formed.
int64_t times_in(const Markup& drawn, std::string_view part) {
  const std::string page = whole_page("chart", drawn);
  EXPECT_EQ(HtmlCheck(page).problem(), "");
  const std::string& html = drawn.html();
  int64_t count = 0;
  for (size_t at = html.find(part); at != std::string::npos; at = html.find(part, at + 1)) ++count;
  return count;
}

Chart chart_with(std::vector<ChartLine> lines) {
  return {.title = "Loss", .unit = Unit::kNumber, .scale = Chart::Scale::kAuto, .lines = std::move(lines)};
}

TEST(Chart, NamesStepsAndValues) {
  Curve curve;
  curve.add(1.0, 3.25);
  curve.add(2.0, 2.5);
  const Markup drawn = draw_chart(chart_with({{"loss", curve}}));
  EXPECT_EQ(times_in(drawn, "loss at step 1: 3.2500"), 1);
  EXPECT_EQ(times_in(drawn, "loss at step 2: 2.5000"), 1);
  EXPECT_EQ(times_in(drawn, "class=\"legend\""), 0) << "there is one line";
  EXPECT_EQ(times_in(drawn, "class=\"band"), 0) << "each point is drawn";
}

TEST(Chart, DrawsABandWherePointsSharePlaces) {
  const Markup drawn = draw_chart(chart_with({{"loss", noise(100'000)}}));
  EXPECT_EQ(times_in(drawn, "class=\"band c0\""), 1);
  EXPECT_LT(drawn.html().size(), 80'000u);
}

TEST(Chart, ShowsWhereValuesAreNotFinite) {
  Curve curve;
  for (const double value : {3.0, kNaN, 2.0, 2.1, kInfinity})
    curve.add(static_cast<double>(curve.size() + 1), value);
  const Markup drawn = draw_chart(chart_with({{"loss", curve}}));
  EXPECT_EQ(times_in(drawn, "class=\"bad\""), 2);
  EXPECT_EQ(times_in(drawn, "2 values are not finite"), 1);
  EXPECT_EQ(times_in(drawn, "class=\"line c0\""), 1) << "of steps 3 and 4 alone";
  Curve none;
  none.add(1.0, kNaN);
  EXPECT_EQ(times_in(draw_chart(chart_with({{"loss", none}})), "1 value is not finite"), 1);
}

TEST(Chart, DrawsALineWiderThatAnotherCovers) {
  const Curve curve = noise(9);
  Curve other = curve;
  const auto under = [&](const Curve& above) {
    return times_in(draw_chart(chart_with({{"busy", curve}, {"waited", above}})), "class=\"line c0 under\"");
  };
  EXPECT_EQ(under(other), 1);
  other.y[3] += 1.0;
  EXPECT_EQ(under(other), 0);
  EXPECT_EQ(times_in(draw_chart(chart_with({{"busy", curve}, {"waited", curve}})), "c1 under"), 0);
}

TEST(Chart, EventsStandByThemselvesFromZeroOn) {
  Curve curve;
  curve.add(200.0, 3.0);
  curve.add(400.0, 5.0);
  Chart chart = chart_with({{"wait", curve}});
  chart.form = Chart::Form::kEvents;
  const Markup drawn = draw_chart(chart);
  EXPECT_EQ(times_in(drawn, "<path"), 0) << "nothing joins them";
  EXPECT_EQ(times_in(drawn, "<line class=\"line c0\""), 2);
  EXPECT_EQ(times_in(drawn, ">0<"), 1) << "the first step on the axis";
}

TEST(Chart, IsNotThereWithoutAPoint) {
  EXPECT_TRUE(draw_chart(chart_with({})).empty());
  EXPECT_TRUE(draw_chart(chart_with({{"loss", {}}})).empty());
  EXPECT_TRUE(draw_distribution({.title = "Times", .values = {kNaN}}).empty());
}

TEST(Chart, TakesALogScaleForWhatIsFarApartAndPositive) {
  const auto is_log = [](const std::vector<double>& values) {
    Curve curve;
    for (const double value : values) curve.add(static_cast<double>(curve.size() + 1), value);
    return times_in(draw_chart(chart_with({{"loss", curve}})), "log scale") == 1;
  };
  EXPECT_FALSE(is_log({10.8, 5.0, 3.0, 1.9}));
  EXPECT_TRUE(is_log({2.3, 0.5, 0.01}));
  EXPECT_FALSE(is_log({2.3, 0.5, 0.0}));
  EXPECT_TRUE(is_log({20.0, 1.0, 1.0, 1.0})) << "one value alone would press all others to the ground";
}

TEST(Chart, NamesOfRunsAreText) {
  Curve curve;
  curve.add(1.0, 1.0);
  const Markup drawn = draw_chart(chart_with({{"<script>a</script>", curve}, {"b", curve}}));
  EXPECT_EQ(times_in(drawn, "<script"), 0);
  EXPECT_EQ(times_in(drawn, "&lt;script&gt;a&lt;/script&gt;"), 2) << "in the legend and in the tooltip";
}

TEST(ChartsByThemselves, ArePicturesWithTheirOwnColours) {
  Curve curve;
  curve.add(1.0, 3.25);
  curve.add(2.0, kNaN);
  curve.add(3.0, 2.0);
  const Chart chart = chart_with({{"a <b>", curve}, {"validation", curve}, {"nothing", {}}});
  const std::string svg = charts_as_svg("run <i>", {chart, chart_with({}), chart, chart});
  EXPECT_EQ(times_in(Markup::trusted(svg), "class=\"plot\""), 3) << "one has no point";
  EXPECT_EQ(times_in(Markup::trusted(svg), ">run &lt;i&gt;<"), 1);
  EXPECT_EQ(times_in(Markup::trusted(svg), ">a &lt;b&gt;<"), 3);
  EXPECT_EQ(times_in(Markup::trusted(svg), ">nothing<"), 0);
  EXPECT_EQ(times_in(Markup::trusted(svg), "2 values are not finite"), 3) << "one of each line";
  EXPECT_EQ(times_in(Markup::trusted(svg), "var(--"), 0) << "not all that show SVG know variables";
  for (size_t i = 0; i < kChartColours; ++i) {
    EXPECT_EQ(times_in(Markup::trusted(svg), fmt::format(".line.c{}{{stroke:{}}}", i, kLineColours[i])), 1);
    EXPECT_NE(page_style().find(fmt::format("--c{}: {};", i, kLineColours[i])), std::string_view::npos);
  }
  EXPECT_TRUE(charts_as_svg("run", {chart_with({})}).empty());
}

TEST(Distribution, CountsEveryValueAndSaysWhatLiesFarOut) {
  std::vector<double> values;
  for (int i = 0; i < 200; ++i) values.push_back(100.0 + 0.1 * i);
  values.push_back(5000.0);
  const Markup drawn = draw_distribution({.title = "Times", .unit = Unit::kMilliseconds, .values = values});
  EXPECT_EQ(times_in(drawn, "The last bar counts 1 beyond it, up to 5.00 s."), 1);
  EXPECT_GE(times_in(drawn, "class=\"bar c0\""), 4);
  EXPECT_EQ(times_in(draw_distribution({.title = "Times", .values = {3.0, 3.0}}), ": 2 steps"), 1);
}

}  // namespace
}  // namespace trireme::report
