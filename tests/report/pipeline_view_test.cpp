// A step of a pipeline in tables, JSON, pictures and traces.
#include "trireme/report/pipeline_view.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

namespace trireme::report {
namespace {

using plan::StageEvent;
using Kind = plan::ActionKind;
using Json = nlohmann::json;

/// Two ranks, two micro-batches of 1F1B in seconds; rank 1 begins late.
plan::PipelineReport some_step() {
  const auto pass = [](Kind kind, int64_t stage, int64_t micro_batch, double begin, double end,
                       double bytes) {
    return StageEvent{
        .kind = kind, .stage = stage, .micro_batch = micro_batch, .begin = begin, .end = end, .bytes = bytes};
  };
  const auto message = [](Kind kind, plan::Message what, int64_t stage, int64_t micro_batch, double begin,
                          double end) {
    return StageEvent{.kind = kind,
                      .stage = stage,
                      .micro_batch = micro_batch,
                      .message = what,
                      .begin = begin,
                      .end = end,
                      .bytes = kind == Kind::kSend ? 4096.0 : 0.0};
  };
  constexpr auto kActivation = plan::Message::kActivation;
  constexpr auto kGradient = plan::Message::kGradient;
  return plan::report_step(plan::make_schedule(plan::ScheduleName::k1F1B, {2, 2}),
                           {{pass(Kind::kForward, 0, 0, 0, 0.001, 1 << 20),
                             message(Kind::kSend, kActivation, 1, 0, 0.001, 0.0011),
                             pass(Kind::kForward, 0, 1, 0.0011, 0.0021, 1 << 20),
                             message(Kind::kSend, kActivation, 1, 1, 0.0021, 0.0022),
                             message(Kind::kRecv, kGradient, 0, 0, 0.0022, 0.0052),
                             pass(Kind::kBackward, 0, 0, 0.0052, 0.0072, -(1 << 20)),
                             message(Kind::kRecv, kGradient, 0, 1, 0.0072, 0.0082),
                             pass(Kind::kBackward, 0, 1, 0.0082, 0.0102, -(1 << 20)),
                             {.kind = Kind::kReduce, .begin = 0.0102, .end = 0.0104}},
                            {message(Kind::kRecv, kActivation, 1, 0, 0, 0.0015),
                             pass(Kind::kForward, 1, 0, 0.002, 0.003, 1 << 19),
                             pass(Kind::kBackward, 1, 0, 0.003, 0.005, -(1 << 19)),
                             message(Kind::kSend, kGradient, 0, 0, 0.005, 0.0051),
                             message(Kind::kRecv, kActivation, 1, 1, 0.0051, 0.0051),
                             pass(Kind::kForward, 1, 1, 0.0051, 0.0061, 1 << 19),
                             pass(Kind::kBackward, 1, 1, 0.0061, 0.0081, -(1 << 19)),
                             message(Kind::kSend, kGradient, 0, 1, 0.0081, 0.0082),
                             {.kind = Kind::kReduce, .begin = 0.0082, .end = 0.009}}});
}

TEST(PipelineView, TableHasMeasuredBesideSimulated) {
  const std::string text = to_text(some_step());
  EXPECT_NE(text.find("1f1b, one step: 10.200 ms, simulated with the measured costs 9.400 ms"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("schedule  imbalance  communication  host"), std::string::npos) << text;
  EXPECT_NE(text.find("2.00 MiB"), std::string::npos) << "two micro-batches in flight\n" << text;
  EXPECT_NE(text.find("forward queue"), std::string::npos) << text;
}

TEST(PipelineView, JsonHasSecondsAndBytes) {
  const plan::PipelineReport report = some_step();
  const auto json = to_json(report);
  const auto& rank = json["measured"]["ranks"][1];
  double causes = 0.0;
  for (const auto& [name, seconds] : rank["idle_causes_s"].items()) causes += seconds.get<double>();
  EXPECT_NEAR(causes, rank["idle_s"].get<double>(), 1e-12);
  EXPECT_EQ(json["measured"]["ranks"][0]["peak_activation_bytes"], 2 << 20);
  EXPECT_EQ(json["simulated"]["ranks"][0]["sent_bytes"], 8192);
  EXPECT_FALSE(json["simulated"]["ranks"][0].contains("idle_causes_s"));
}

TEST(PipelineView, PictureHasTheSimulatedStepAboveTheMeasuredOneAndCausesOfGaps) {
  const Timeline timeline = timeline_of(some_step());
  ASSERT_EQ(timeline.rows.size(), 4u);
  EXPECT_EQ(timeline.rows[0].heading.rfind("simulated with the measured costs", 0), 0u);
  EXPECT_EQ(timeline.rows[2].heading.rfind("measured: 10.20 ms", 0), 0u);
  EXPECT_TRUE(timeline.rows[0].gaps.empty());
  double idle = 0.0;
  for (const Bar& gap : timeline.rows[3].gaps) idle += gap.end - gap.begin;
  EXPECT_NEAR(idle, 10.2 - 6.0, 1e-9) << "ms";
  const std::string svg = draw_svg(timeline);
  EXPECT_NE(svg.find("<title>idle: host: 1.5 to 2 ms</title>"), std::string::npos) << svg;
  EXPECT_NE(svg.find(">communication</text>"), std::string::npos);
  EXPECT_EQ(svg.find("backward, weights"), std::string::npos) << "the legend has what is drawn";
  const std::string text = draw_text(timeline, 120);
  EXPECT_NE(text.find("idle: . schedule, ~ imbalance, - communication, ! host"), std::string::npos) << text;
}

/// What ui.perfetto.dev wants of the format (Chrome's trace events): known phases, numbers where it wants
/// them, slices of a thread that nest, both ends of each arrow inside of a slice.
TEST(PipelineView, TraceIsWellFormed) {
  const plan::PipelineReport report = some_step();
  const Json trace = Json::parse(trace_of(report));
  std::map<std::pair<int64_t, int64_t>, std::vector<std::pair<double, double>>> slices;
  std::set<std::pair<int64_t, int64_t>> named;
  std::map<int64_t, std::vector<std::string>> arrows;
  size_t passes = 0, counters = 0;
  for (const Json& event : trace.at("traceEvents")) {
    const std::string phase = event.at("ph");
    const int64_t pid = event.at("pid");
    if (phase == "C") {
      EXPECT_TRUE(event.at("ts").is_number() && event.at("args").at("bytes").is_number());
      ++counters;
      continue;
    }
    const std::pair<int64_t, int64_t> thread{pid, event.at("tid")};
    if (phase == "M") {
      if (event.at("name") == "thread_name") named.insert(thread);
      EXPECT_TRUE(event.at("args").at("name").is_string());
    } else if (phase == "X") {
      ASSERT_TRUE(event.at("name").is_string() && event.at("cat").is_string());
      const double begin = event.at("ts"), duration = event.at("dur");
      EXPECT_GE(begin, 0.0);
      EXPECT_GE(duration, 0.0);
      slices[thread].emplace_back(begin, begin + duration);
      passes += event.contains("args") && event["args"].contains("stage");
    } else {
      ASSERT_TRUE(phase == "s" || phase == "f") << phase;
      arrows[event.at("id").get<int64_t>()].push_back(phase);
    }
  }
  EXPECT_EQ(passes, 2u * 8u) << "measured and simulated";
  EXPECT_EQ(counters, 2u * 8u);
  EXPECT_EQ(arrows.size(), 4u) << "two micro-batches there and back";
  for (const auto& [id, ends] : arrows) EXPECT_EQ(ends, (std::vector<std::string>{"s", "f"})) << id;
  constexpr double kMicro = 1e-3;  // us
  for (auto& [thread, of] : slices) {
    EXPECT_TRUE(named.contains(thread)) << thread.first << ", " << thread.second;
    std::ranges::sort(of);
    for (size_t i = 1; i < of.size(); ++i)
      EXPECT_GE(of[i].first, of[i - 1].second - kMicro) << "slices of thread " << thread.second << " overlap";
  }
  for (const Json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "s" && event.at("ph") != "f") continue;
    const double at = event.at("ts");
    const auto& of = slices[{event.at("pid"), event.at("tid")}];
    EXPECT_TRUE(std::ranges::any_of(of, [&](const auto& slice) {
      return slice.first <= at && at <= slice.second;
    })) << event;
  }
}

}  // namespace
}  // namespace trireme::report
