#include "trireme/base/text.h"

#include <gtest/gtest.h>

#include <cmath>

namespace trireme {
namespace {

TEST(FormatCount, UsesPowersOfAThousand) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(7), "7");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1.00k");
  EXPECT_EQ(format_count(12345), "12.3k");
  EXPECT_EQ(format_count(4.56e6), "4.56M");
  EXPECT_EQ(format_count(1.235814400e9), "1.24B");
  EXPECT_EQ(format_count(3e12), "3.00T");
}

TEST(FormatCount, NeverShowsAThousandOfAUnit) {
  EXPECT_EQ(format_count(999.6), "1.00k");
  EXPECT_EQ(format_count(999600), "1.00M");
  EXPECT_EQ(format_count(999400), "999k");
}

TEST(FormatCount, ReadsBackWithinThreeDigits) {
  const std::string units = "kMBT";
  for (double value = 1000; value < 9e14; value *= 1.37) {
    const std::string text = format_count(value);
    const size_t unit = units.find(text.back());
    ASSERT_NE(unit, std::string::npos) << text;
    EXPECT_NEAR(std::stod(text) * std::pow(1000.0, static_cast<double>(unit) + 1), value, 0.0051 * value)
        << text;
  }
}

TEST(FormatBytes, UsesPowersOf1024) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(12.3 * 1024), "12.3 KiB");
  EXPECT_EQ(format_bytes(1.24 * 1024 * 1024 * 1024), "1.24 GiB");
  EXPECT_EQ(format_bytes(139.0 * 1024 * 1024 * 1024), "139 GiB");
}

TEST(FormatDuration, PicksTheUnit) {
  EXPECT_EQ(format_duration(350e-6), "350 us");
  EXPECT_EQ(format_duration(12.3e-3), "12.3 ms");
  EXPECT_EQ(format_duration(4.56), "4.56 s");
  EXPECT_EQ(format_duration(200), "3m 20s");
  EXPECT_EQ(format_duration(3599.6), "1h 00m");
  EXPECT_EQ(format_duration(7500), "2h 05m");
}

TEST(WithCommas, GroupsByThree) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-1000), "-1,000");
  EXPECT_EQ(with_commas(-999), "-999");
  EXPECT_EQ(with_commas(123456789), "123,456,789");
  EXPECT_EQ(with_commas(INT64_MIN), "-9,223,372,036,854,775,808");
}

TEST(WithCommas, ReadsBackWithoutTheCommas) {
  for (int64_t value = 1; value < INT64_MAX / 7; value = value * 7 + 3) {
    std::string text = with_commas(value);
    std::erase(text, ',');
    EXPECT_EQ(text, std::to_string(value));
  }
}

TEST(NumberText, OfNaNHasNoSign) {
  EXPECT_EQ(number_text(std::copysign(NAN, -1.0)), "nan");
  EXPECT_EQ(number_text(-INFINITY), "-inf");
  EXPECT_EQ(number_text(0.25), "0.25");
}

TEST(SplitAndJoin, AreInverse) {
  for (const std::string text : {"", "a", "a,b", ",", "a,,b", ",a,"})
    EXPECT_EQ(join(split(text, ','), ","), text);
}

TEST(Split, GivesOnePieceMoreThanSeparators) {
  EXPECT_EQ(split("", ','), std::vector<std::string>{""});
  EXPECT_EQ(split("a,,b", ','), (std::vector<std::string>{"a", "", "b"}));
}

TEST(Join, OfNothingIsEmpty) {
  EXPECT_EQ(join({}, ", "), "");
}

TEST(NearestName, FindsTypingErrors) {
  const std::vector<std::string> names = {"steps", "global_batch", "micro_batch"};
  EXPECT_EQ(nearest_name("step", names), "steps");
  EXPECT_EQ(nearest_name("stpes", names), "steps");
  EXPECT_EQ(nearest_name("global_bach", names), "global_batch");
  EXPECT_EQ(nearest_name("steps", names), "steps");
}

TEST(NearestName, OfTwoAsNearIsTheOneWhoseEndIsMissing) {
  for (const std::vector<std::string>& names : {std::vector<std::string>{"stem", "steps"}, {"steps", "stem"}})
    EXPECT_EQ(nearest_name("step", names), "steps");
}

TEST(NearestName, AcceptsAThirdOfTheLettersWrong) {
  const std::vector<std::string> names = {"abcdef", "data", "--flip"};
  EXPECT_EQ(nearest_name("xycdef", names), "abcdef");
  EXPECT_EQ(nearest_name("xyzdef", names), "") << "half of them";
  EXPECT_EQ(nearest_name("dat", names), "data") << "one at least";
  EXPECT_EQ(nearest_name("do", names), "");
}

TEST(NearestName, CountsExchangedNeighboursOnce) {
  EXPECT_EQ(nearest_name("tset", std::vector<std::string>{"test"}), "test");
  EXPECT_EQ(nearest_name("stpe", std::vector<std::string>{"step"}), "step");
}

TEST(NearestName, CountsNoDashesBeforeAnOption) {
  EXPECT_EQ(nearest_name("--fsdp", std::vector<std::string>{"--flip"}), "");
  EXPECT_EQ(nearest_name("--flp", std::vector<std::string>{"--flip"}), "--flip");
  EXPECT_EQ(nearest_name("--", std::vector<std::string>{"--flip"}), "");
}

TEST(NearestName, IsEmptyWhenNothingIsNear) {
  EXPECT_EQ(nearest_name("zzz", std::vector<std::string>{"steps"}), "");
  EXPECT_EQ(nearest_name("steps", {}), "");
}

}  // namespace
}  // namespace trireme
