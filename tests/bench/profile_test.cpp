// Kinds of kernels beside a roof: shares by hand, and what is refused.
#include "trireme/bench/profile.h"

#include <gtest/gtest.h>

#include "tests/bench/planted.h"
#include "trireme/base/error.h"
#include "trireme/bench/results_page.h"
#include "trireme/bench/results_text.h"

namespace trireme::bench {
namespace {

/// A machine of 100 GFLOP/s and 10 GB/s, 40 GB/s from caches.
constexpr double kGiga = 1e9;
const Roof kRoof = {.origin = "rates.json",
                    .ranks = 2,
                    .flops_per_s = 100 * kGiga,
                    .bytes_per_s = 10 * kGiga,
                    .cached_bytes_per_s = 40 * kGiga};

/// 400 MFLOP over 10 MB (40 a byte) in 8 ms: 50 GFLOP/s of 100. 16 MB in 2 ms are 8 GB/s of 10. 20 MB in 1 ms
/// are 20 GB/s, twice what memory gives, and half of what caches do.
ArmProfile traced(int64_t arm) {
  ArmProfile profile{.arm = arm,
                     .directory = "runs/bench/x",
                     .trace = "runs/bench/x/traces/rank-0.json",
                     .counted = {{.group = "GEMM", .flops = 0.4 * kGiga, .bytes = 0.01 * kGiga},
                                 {.group = "norm", .bytes = 0.016 * kGiga},
                                 {.group = "activation", .bytes = 0.02 * kGiga}},
                     .roof = kRoof};
  profile.kernels = {.of_gpu = false,
                     .steps = 4,
                     .groups = {{.name = "GEMM", .ms = 8.0, .calls = 12},
                                {.name = "communication", .ms = 3.0, .calls = 5},
                                {.name = "norm", .ms = 2.0, .calls = 4},
                                {.name = "activation", .ms = 1.0, .calls = 2}},
                     .step_ms = 15.0,
                     .idle_ms = 1.0};
  return profile;
}

TEST(Roofline, SharesAreThoseThatAHandComputes) {
  const std::vector<GroupRates> rates = rates_of(traced(0));
  ASSERT_EQ(rates.size(), 4u);
  const GroupRates &products = rates[0], &messages = rates[1], &norm = rates[2], &activation = rates[3];
  EXPECT_DOUBLE_EQ(products.intensity, 40.0);
  EXPECT_DOUBLE_EQ(products.flops_per_s, 50 * kGiga);
  EXPECT_DOUBLE_EQ(products.bytes_per_s, 1.25 * kGiga);
  EXPECT_DOUBLE_EQ(products.share, 0.5);
  EXPECT_EQ(products.bound, "products");
  EXPECT_EQ(messages.bytes, 0.0);
  EXPECT_EQ(messages.share, 0.0);
  EXPECT_EQ(messages.bound, "");
  EXPECT_EQ(norm.flops, 0.0);
  EXPECT_EQ(norm.intensity, 0.0);
  EXPECT_DOUBLE_EQ(norm.bytes_per_s, 8 * kGiga);
  EXPECT_DOUBLE_EQ(norm.share, 0.8);
  EXPECT_EQ(norm.bound, "memory");
  EXPECT_DOUBLE_EQ(activation.share, 0.5) << "its bytes can only have come from caches";
  EXPECT_EQ(activation.bound, "caches");
  EXPECT_EQ(above_roof(traced(0)), "");
}

/// Other mixes of reads and writes are a little faster than the pass that was measured.
TEST(Roofline, ATenthAboveMemoryIsStillMemory) {
  ArmProfile profile = traced(0);
  profile.counted = {{.group = "norm", .bytes = 0.0214 * kGiga}};
  EXPECT_EQ(rates_of(profile)[2].bound, "memory");
  EXPECT_DOUBLE_EQ(rates_of(profile)[2].share, 1.07);
  EXPECT_EQ(above_roof(profile), "");
  profile.counted = {{.group = "norm", .bytes = 0.0224 * kGiga}};
  EXPECT_EQ(rates_of(profile)[2].bound, "caches");
}

/// Four FLOPs a byte are below the ridge of ten: 40 MFLOP over 10 MB need 1 ms of memory, 0.4 ms of products.
TEST(Roofline, FewFlopsAByteAreBoundByMemory) {
  ArmProfile profile = traced(0);
  profile.counted = {{.group = "GEMM", .flops = 0.04 * kGiga, .bytes = 0.01 * kGiga}};
  const GroupRates products = rates_of(profile)[0];
  EXPECT_EQ(products.bound, "memory");
  EXPECT_DOUBLE_EQ(products.share, 1.0 / 8.0);
}

TEST(Roofline, AShareAboveOneBeyondNoiseIsNamed) {
  ArmProfile profile = traced(0);
  profile.kernels.groups[0].ms = 3.7;  // 4 ms at the roof: 1.08
  EXPECT_EQ(above_roof(profile), "");
  profile.kernels.groups[0].ms = 3.2;
  const std::string why = above_roof(profile);
  EXPECT_NE(
      why.find("GEMM took 3.200 ms a step, but at the rates of rates.json (products) it takes 4.000 ms, "
               "1.25 times as long"),
      std::string::npos)
      << why;
  profile = traced(0);
  profile.kernels.groups[3].ms = 0.4;  // 50 GB/s, more than caches give
  EXPECT_NE(above_roof(profile).find("activation took 0.400 ms"), std::string::npos) << above_roof(profile);
  profile.roof->cached_bytes_per_s = 0.0;  // of an older file: memory is all that is known
  profile.kernels.groups[3].ms = 1.0;
  EXPECT_NE(above_roof(profile).find("2.00 times"), std::string::npos) << above_roof(profile);
}

TEST(Roofline, WithoutARoofOrCountsThereIsNoShare) {
  ArmProfile profile = traced(0);
  profile.roof.reset();
  for (const GroupRates& one : rates_of(profile)) EXPECT_EQ(one.share, 0.0) << one.group.name;
  EXPECT_DOUBLE_EQ(rates_of(profile)[0].flops_per_s, 50 * kGiga) << "what was reached needs no roof";
  profile = traced(0);
  profile.counted.clear();
  for (const GroupRates& one : rates_of(profile)) EXPECT_EQ(one.flops + one.bytes + one.share, 0.0);
}

TEST(Profile, UnknownDepthsAreRefusedWithTheNearest) {
  EXPECT_EQ(depth_of("deep"), Depth::kDeep);
  EXPECT_EQ(depth_of("roofline"), Depth::kRoofline);
  try {
    depth_of("rooflin");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'roofline'"), std::string::npos) << error.what();
  }
}

Results profiled(const TargetResult& target) {
  Results results;
  results.profile = "roofline";
  results.complete = true;
  results.targets = {target};
  return results;
}

TEST(Profile, IsPartOfAllReports) {
  TargetResult target = planted_target();
  target.profiles = {traced(0), {.arm = 1, .error = "a run ended with code 6"}};
  judge(target, "");
  EXPECT_EQ(target.state, State::kMeasured) << target.reason;
  EXPECT_EQ(target.checks.back().what, "no kind of kernel is faster than this machine was measured to be");
  const Results results = profiled(target);
  EXPECT_EQ(exit_code(results), 0) << "a profile that could not be taken is no failure";
  for (const std::string& text : {to_text(results, 200), to_markdown(results), to_page(results)}) {
    for (const char* words : {"GEMM", "400 MFLOP", "50 GFLOP/s", "50%", "not counted", "caches",
                              "runs/bench/x/traces/rank-0.json", "CPU operators of rank 0",
                              "no profile: a run ended with code 6"})
      EXPECT_NE(text.find(words), std::string::npos) << words << "\n" << text;
  }
  const Results read = results_from_json(to_json_text(results), "results.json");
  EXPECT_EQ(to_json_text(read), to_json_text(results));
  ASSERT_EQ(read.targets[0].profiles.size(), 2u);
  EXPECT_EQ(read.targets[0].profiles[0].kernels.groups[1].calls, 5);
  EXPECT_FALSE(read.targets[0].profiles[1].roof);
}

TEST(Profile, OneAboveTheRoofBlocksItsTarget) {
  TargetResult target = planted_target();
  target.profiles = {traced(0), traced(1)};
  target.profiles[1].kernels.groups[2].ms = 0.2;  // 80 GB/s
  judge(target, "");
  EXPECT_EQ(target.state, State::kBlocked);
  EXPECT_NE(target.reason.find("norm took 0.200 ms"), std::string::npos) << target.reason;
  EXPECT_EQ(exit_code(profiled(target)), 8);
}

TEST(Profile, DeepShowsTimesAlone) {
  TargetResult target = planted_target();
  target.profiles = {traced(0)};
  Results results = profiled(target);
  results.profile = "deep";
  const Rows rows = profile_rows_of(results);
  EXPECT_EQ(rows.titles, (std::vector<std::string>{"target", "arm", "kind", "ms/step", "calls/step"}));
  ASSERT_EQ(rows.cells.size(), 4u);
  EXPECT_EQ(rows.cells[1][3], "3.000");
}

TEST(Profile, OlderResultsHaveNone) {
  nlohmann::json json = nlohmann::json::parse(to_json_text(profiled(planted_target())));
  json["targets"][0].erase("profiles");
  EXPECT_TRUE(results_from_json(json.dump(), "results.json").targets[0].profiles.empty());
}

}  // namespace
}  // namespace trireme::bench
