// Ratios, their intervals and what they say; and what is left of a bench on the disk.
#include "trireme/bench/verdict.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/bench/planted.h"
#include "trireme/base/error.h"
#include "trireme/bench/results_page.h"
#include "trireme/bench/results_text.h"

namespace trireme::bench {
namespace {

TEST(RunOrder, GoesThereAndBack) {
  std::string arms;
  for (const Slot& slot : run_order(3, 2)) arms += static_cast<char>('A' + slot.arm);
  EXPECT_EQ(arms, "ABCCBAABCCBA");
}

TargetResult judged(double ratio) {
  TargetResult target = planted_target(ratio);
  judge(target, "");
  return target;
}

TEST(Verdict, ThreeBlocksAreSixRatios) {
  const Score faster = score(judged(1.2))[1];
  EXPECT_EQ(faster.ratios.size(), 6u);
  EXPECT_NEAR(faster.ratio, 1.2, 0.01);
  EXPECT_EQ(faster.verdict, Verdict::kFaster);
  EXPECT_EQ(faster.interval.low, std::ranges::min(faster.ratios));
  EXPECT_EQ(faster.interval.high, std::ranges::max(faster.ratios));
}

TEST(Verdict, WhatIsSlowerIsSaidToBe) {
  const Score slower = score(judged(0.8))[1];
  EXPECT_NEAR(slower.ratio, 0.8, 0.01);
  EXPECT_EQ(slower.verdict, Verdict::kSlower);
}

TEST(Verdict, AnIntervalWithOneInItIsNoDifference) {
  TargetResult target = judged(1.05);
  // In one of six pairs the arm was slower.
  for (Sample& sample : target.samples) {
    if (sample.slot == Slot{.block = 1, .half = 1, .arm = 1}) {
      for (double& ms : sample.step_ms) ms *= 1.2;
    }
  }
  const Score one = score(target)[1];
  EXPECT_GT(one.ratio, 1.0);
  EXPECT_EQ(one.verdict, Verdict::kNoDifference);
}

/// A step of the warm-up may take any time; one that is counted moves the median little, but the mean much.
TEST(Verdict, OnlyStepsBehindTheWarmUpCount) {
  Sample sample = planted_sample({}, 10.0);
  const double median = value_of(sample, Statistic::kMedian, 2);
  sample.step_ms[1] = 1e6;
  EXPECT_EQ(value_of(sample, Statistic::kMedian, 2), median);
  sample.step_ms[7] = 1000.0;
  EXPECT_LT(value_of(sample, Statistic::kMedian, 2), 11.0);
  EXPECT_GT(value_of(sample, Statistic::kMean, 2), 100.0);
}

/// A ratio is of runs that stood beside each other: a machine that grows slower from block to block changes
/// no ratio.
TEST(Verdict, ADriftOfTheMachineChangesNoRatio) {
  TargetResult steady = judged(1.1), drifting = steady;
  for (Sample& sample : drifting.samples) {
    for (double& ms : sample.step_ms) ms *= 1.0 + 0.5 * static_cast<double>(sample.slot.block);
  }
  const Score a = score(steady)[1], b = score(drifting)[1];
  for (size_t i = 0; i < a.ratios.size(); ++i) EXPECT_NEAR(a.ratios[i], b.ratios[i], 1e-12);
}

TEST(Verdict, IntervalsOfSixHoldTheTruthAsOftenAsTheySay) {
  EXPECT_DOUBLE_EQ(coverage(2), 0.5);
  EXPECT_DOUBLE_EQ(coverage(6), 0.96875);
  std::mt19937 random(7);
  std::lognormal_distribution<double> noise(0.0, 0.05);
  int held = 0;
  constexpr int kRepeats = 4000;
  for (int i = 0; i < kRepeats; ++i) {
    TargetResult target = planted_target(1.0);
    target.state = State::kMeasured;
    for (Sample& sample : target.samples) {
      const double factor = noise(random);
      for (double& ms : sample.step_ms) ms = 10.0 * factor;
    }
    held += score(target)[1].verdict == Verdict::kNoDifference ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(held) / kRepeats, coverage(6), 0.012);
}

TEST(Verdict, FewRatiosSayPerhaps) {
  EXPECT_EQ(verdict_text(score(judged(1.2))[1]), "faster");
  TargetResult few = judged(1.2);
  few.samples.resize(4);
  EXPECT_EQ(verdict_text(score(few)[1]), "perhaps faster") << "one block is two ratios";
}

TEST(Verdict, BlockedTargetsHaveNoRatio) {
  TargetResult target = planted_target();
  target.samples[1].weights_digest = "ff";
  judge(target, "");
  for (const Score& one : score(target)) {
    EXPECT_TRUE(one.ratios.empty());
    EXPECT_EQ(one.verdict, Verdict::kBlocked);
  }
}

Results planted_results() {
  Results results;
  results.command = "trireme bench run";
  results.machine = {.hostname = "host", .cpu = "A|B", .kernel = "Linux", .device = "cpu", .cores = 2};
  results.complete = true;
  results.targets = {judged(1.2)};
  return results;
}

TEST(BenchResults, EndWithTheCodeOfTheWorst) {
  Results results = planted_results();
  EXPECT_EQ(exit_code(results), 0);
  TargetResult skipped;
  skipped.state = State::kSkipped;
  results.targets.push_back(skipped);
  EXPECT_EQ(exit_code(results), 0);
  results.targets[0].state = State::kBlocked;
  EXPECT_EQ(exit_code(results), 8);
  results.targets[0].state = State::kFailed;
  EXPECT_EQ(exit_code(results), 1);
  results.targets.erase(results.targets.begin());
  EXPECT_EQ(exit_code(results), 3) << "all were skipped";
}

TEST(BenchResults, AreReadAsTheyWereWritten) {
  const std::string text = to_json_text(planted_results());
  EXPECT_EQ(to_json_text(results_from_json(text, "x")), text);
  EXPECT_THROW(results_from_json("{}", "x"), DataError);
  EXPECT_THROW(results_from_json("[", "x"), DataError);
  EXPECT_THROW(read_results("/nowhere"), ConfigError);
}

TEST(BenchResults, AreShownInEveryForm) {
  Results results = planted_results();
  const std::string ratio = fmt::format("{:.3f}", score(results.targets[0])[1].ratio);
  EXPECT_NE(to_text(results, 200).find(ratio), std::string::npos) << to_text(results, 200);
  EXPECT_NE(to_markdown(results).find("| b | 2 |"), std::string::npos) << to_markdown(results);
  EXPECT_NE(to_page(results).find("<rect"), std::string::npos);
  EXPECT_NE(to_page(results).find(ratio), std::string::npos);
  const std::string csv = to_csv(results);
  EXPECT_EQ(std::ranges::count(csv, '\n'), 1 + 12 * 8) << "a title, and twelve runs of eight steps";
  results.profile = "none";
  EXPECT_EQ(to_text(results, 200).find("sent/step"), std::string::npos);
}

TEST(BenchResults, SayWhatWasSavedWhereTheyAreAskedTo) {
  Results results = planted_results();
  EXPECT_EQ(to_text(results, 0).find("summary"), std::string::npos);
  results.targets[0].shows_memory = true;
  for (Sample& sample : results.targets[0].samples) sample.state_bytes = sample.slot.arm == 0 ? 2048 : 1024;
  EXPECT_NE(to_text(results, 0).find("a holds 2.00 KiB of model state a rank, b holds 1.00 KiB, 50.0% less"),
            std::string::npos)
      << to_text(results, 0);
}

}  // namespace
}  // namespace trireme::bench
