// What a step of a pipeline is said to have been, on lists of events whose answers are known.
#include "trireme/plan/pipeline_report.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "tests/plan/schedules.h"
#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;

StageEvent pass(Kind kind, int64_t stage, int64_t micro_batch, double begin, double end, double bytes = 0.0) {
  return {
      .kind = kind, .stage = stage, .micro_batch = micro_batch, .begin = begin, .end = end, .bytes = bytes};
}
StageEvent message(Kind kind, Message what, int64_t stage, int64_t micro_batch, double begin, double end,
                   double bytes = 0.0) {
  return {.kind = kind,
          .stage = stage,
          .micro_batch = micro_batch,
          .message = what,
          .begin = begin,
          .end = end,
          .bytes = bytes};
}

double cause(const PipelineReport& report, size_t rank, IdleCause cause) {
  return report.measured.ranks[rank].idle_causes[static_cast<size_t>(cause)];
}

void expect_causes(const PipelineReport& report, size_t rank, const std::array<double, kIdleCauses>& wanted) {
  for (size_t i = 0; i < kIdleCauses; ++i) {
    EXPECT_NEAR(report.measured.ranks[rank].idle_causes[i], wanted[i], kNear)
        << "rank " << rank << ", " << name(static_cast<IdleCause>(i));
  }
}

/// The messages of a step of two ranks and one micro-batch travel for 0.2 and 0.1, and rank 1 begins 0.3
/// late. All is shifted by 10, since clocks begin anywhere.
StageEvents one_micro_batch() {
  StageEvents events = {{pass(Kind::kForward, 0, 0, 0, 1, 100),
                         message(Kind::kSend, Message::kActivation, 1, 0, 1, 1, 64),
                         message(Kind::kRecv, Message::kGradient, 0, 0, 1, 4.6),
                         pass(Kind::kBackward, 0, 0, 4.6, 6.6, -100),
                         {.kind = Kind::kUpdate, .begin = 6.6, .end = 7.0}},
                        {message(Kind::kRecv, Message::kActivation, 1, 0, 0, 1.2),
                         pass(Kind::kForward, 1, 0, 1.5, 2.5, 40), pass(Kind::kBackward, 1, 0, 2.5, 4.5, -40),
                         message(Kind::kSend, Message::kGradient, 0, 0, 4.5, 4.5, 64)}};
  for (auto& rank : events) {
    for (StageEvent& event : rank) {
      event.begin += 10.0;
      event.end += 10.0;
    }
  }
  return events;
}

TEST(PipelineReport, SaysWhyRanksWereIdle) {
  const Schedule schedule = make_schedule(ScheduleName::k1F1B, {2, 1});
  const PipelineReport report = report_step(schedule, one_micro_batch());
  EXPECT_NEAR(report.measured.seconds, 6.6, kNear);
  EXPECT_NEAR(report.after_s, 0.4, kNear);
  EXPECT_NEAR(report.measured.ranks[0].busy, 3.0, kNear);
  EXPECT_NEAR(report.measured.ranks[0].idle, 3.6, kNear);
  // While rank 1 waits for the message and its host is late, rank 0 waits for the same.
  expect_causes(report, 0, {3.0, 0.0, 0.3, 0.3});
  expect_causes(report, 1, {3.0, 0.0, 0.3, 0.3});
  EXPECT_NEAR(report.events[0][0].begin, 0.0, kNear);
  EXPECT_EQ(report.idle[0].size(), 3u) << "schedule, communication, host";
  EXPECT_EQ(report.idle[0][2].cause, IdleCause::kHost);
  EXPECT_NEAR(report.idle[0][0].begin, 1.0, kNear);
  EXPECT_NEAR(report.idle[0][2].end, 4.6, kNear);
}

TEST(PipelineReport, CountsWhatWasHeldQueuedAndSent) {
  const PipelineReport report = report_step(make_schedule(ScheduleName::k1F1B, {2, 1}), one_micro_batch());
  EXPECT_EQ(report.measured.ranks[0].peak_bytes, 100);
  EXPECT_EQ(report.measured.ranks[1].peak_bytes, 40);
  EXPECT_EQ(report.measured.ranks[0].sent_bytes, 64);
  EXPECT_EQ(report.predicted.ranks[0].peak_bytes, 100);
  EXPECT_EQ(report.predicted.ranks[1].sent_bytes, 64);
  EXPECT_EQ(report.measured.stages[0].forward_queue, 0) << "the first stage has its input from the beginning";
  EXPECT_EQ(report.measured.stages[1].forward_queue, 1);
  EXPECT_EQ(report.measured.stages[0].backward_queue, 1);
  // 0.2 and 0.1: half way between them.
  EXPECT_NEAR(report.costs.transfer, 0.15, kNear);
  EXPECT_NEAR(report.predicted.seconds, 6.3, kNear);
}

/// Stage 1 takes three times as long as stage 0: with equal stages of 2 the ranks would wait for each other
/// once in the beginning and once in the end.
TEST(PipelineReport, TellsImbalanceFromTheSchedule) {
  const Schedule schedule = make_schedule(ScheduleName::kGpipe, {2, 3});
  PassCosts costs;
  costs.forward = costs.backward_input = {1.0, 3.0};
  costs.backward_weight = {0.0, 0.0};
  StageEvents events;
  for (const RankTimeline& rank : simulate(schedule, costs).ranks) {
    double now = 0.0;
    std::vector<StageEvent>& mine = events.emplace_back();
    for (const TimedPass& timed : rank.passes) {
      const bool forward = timed.pass.kind == Kind::kForward;
      const bool waits = forward ? timed.pass.stage == 1 : timed.pass.stage == 0;
      if (waits) {
        mine.push_back(message(Kind::kRecv, forward ? Message::kActivation : Message::kGradient,
                               timed.pass.stage, timed.pass.micro_batch, now, timed.begin));
      }
      mine.push_back(pass(forward ? Kind::kForward : Kind::kBackward, timed.pass.stage,
                          timed.pass.micro_batch, timed.begin, timed.end));
      now = timed.end;
    }
  }
  const PipelineReport report = report_step(schedule, events);
  EXPECT_NEAR(report.measured.seconds, 20.0, kNear);
  // Rank 0 is idle for 14, of which equal stages would leave 2 + 2: it waits for the last forward and the
  // first backward pass of rank 1. In steady backward passes it would wait for nothing.
  EXPECT_NEAR(cause(report, 0, IdleCause::kSchedule), 4.0, kNear);
  EXPECT_NEAR(cause(report, 0, IdleCause::kImbalance), 10.0, kNear);
  // Rank 1 waits for the short passes of rank 0 only.
  expect_causes(report, 1, {2.0, 0.0, 0.0, 0.0});
  EXPECT_NEAR(report.predicted.seconds, report.measured.seconds, kNear);
}

/// Events as ranks would record them: passes take `stretch` times longer, messages a while, hosts are late.
template <typename Stretch>
StageEvents recorded(const Schedule& schedule, const Stretch& stretch, double transfer, double late) {
  StageEvents events(schedule.ranks.size());
  std::vector<size_t> next(schedule.ranks.size(), 0);
  std::vector<double> now(schedule.ranks.size(), 0.0);
  std::map<std::tuple<bool, int64_t, int64_t>, double> made;
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < next.size(); ++rank) {
      while (next[rank] < schedule.ranks[rank].size()) {
        const StagePass& pass = schedule.ranks[rank][next[rank]];
        const bool forward = pass.kind == Kind::kForward,
                   input = pass.kind == Kind::kBackward || pass.kind == Kind::kBackwardInput;
        const int64_t from = pass.stage + (forward ? -1 : 1);
        if ((forward || input) && from >= 0 && from < schedule.stages) {
          const auto found = made.find({forward, from, pass.micro_batch});
          if (found == made.end()) break;
          if (schedule.rank_of(from, pass.micro_batch) != static_cast<int64_t>(rank)) {
            const double arrived = std::max(now[rank], found->second + transfer);
            events[rank].push_back(message(Kind::kRecv, forward ? Message::kActivation : Message::kGradient,
                                           pass.stage, pass.micro_batch, now[rank], arrived));
            now[rank] = arrived;
          }
        }
        const double begin = now[rank] + late, end = begin + stretch(pass);
        events[rank].push_back({.kind = pass.kind,
                                .stage = pass.stage,
                                .micro_batch = pass.micro_batch,
                                .begin = begin,
                                .end = end});
        now[rank] = end;
        if (forward || input) made[{forward, pass.stage, pass.micro_batch}] = end;
        ++next[rank];
        moved = true;
      }
    }
  }
  return events;
}

std::vector<Schedule> some_schedules() {
  std::vector<Schedule> schedules;
  for (const ScheduleName name : all_values<ScheduleName>()) {
    for (const int64_t ranks : {2, 4}) {
      const bool has_chunks = name == ScheduleName::kInterleaved1F1B || name == ScheduleName::kLoopedBfs ||
                              name == ScheduleName::kInterleavedZb;
      schedules.push_back(make_schedule(name, {ranks, 8, has_chunks ? 2 : 1}));
    }
  }
  return schedules;
}

TEST(PipelineReport, OfWhatTheSimulatorWouldDoIsTheSimulation) {
  for (const Schedule& schedule : some_schedules()) {
    const StageEvents events = recorded(
        schedule, [](const StagePass& pass) { return pass.kind == Kind::kBackward ? 2.0 : 1.0; }, 0.0, 0.0);
    const PipelineReport report = report_step(schedule, events);
    EXPECT_NEAR(report.measured.seconds, report.predicted.seconds, kNear) << schedule.name;
    EXPECT_NEAR(report.measured.idle_share(), 1.0 - simulate(schedule).efficiency(), kNear) << schedule.name;
    for (size_t rank = 0; rank < events.size(); ++rank) {
      EXPECT_NEAR(cause(report, rank, IdleCause::kSchedule), report.predicted.ranks[rank].idle, kNear)
          << schedule.name << ", rank " << rank;
    }
    for (size_t stage = 0; stage < report.measured.stages.size(); ++stage) {
      EXPECT_LE(report.measured.stages[stage].busy, report.measured.seconds) << schedule.name;
      EXPECT_EQ(report.measured.stages[stage].forward_queue, report.predicted.stages[stage].forward_queue);
      EXPECT_EQ(report.measured.stages[stage].backward_queue, report.predicted.stages[stage].backward_queue);
    }
  }
}

TEST(PipelineReport, CausesSumToTheIdleTimeAndFillTheGaps) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<double> factor(0.5, 2.0);
  for (const Schedule& schedule : some_schedules()) {
    const StageEvents events = recorded(
        schedule, [&](const StagePass&) { return factor(random); }, 0.25, 0.125);
    const PipelineReport report = report_step(schedule, events);
    for (size_t rank = 0; rank < events.size(); ++rank) {
      const RankUse& use = report.measured.ranks[rank];
      EXPECT_NEAR(use.busy + use.idle, report.measured.seconds, kNear);
      EXPECT_NEAR(std::accumulate(use.idle_causes.begin(), use.idle_causes.end(), 0.0), use.idle, kNear)
          << schedule.name << ", rank " << rank;
      double before = 0.0;
      for (const IdleSpan& span : report.idle[rank]) {
        EXPECT_GE(span.begin, before - kNear);
        EXPECT_GT(span.end, span.begin);
        before = span.end;
      }
    }
  }
}

/// A rank that has been delayed while others were busy keeps them waiting later.
TEST(PipelineReport, DelaysOfEqualStagesAreNotImbalance) {
  for (const Schedule& schedule : some_schedules()) {
    const auto stretch = [](const StagePass& pass) { return pass.kind == Kind::kBackward ? 2.0 : 1.0; };
    const PipelineReport late = report_step(schedule, recorded(schedule, stretch, 0.0, 0.125)),
                         far = report_step(schedule, recorded(schedule, stretch, 0.25, 0.0));
    const double ideal = report_step(schedule, recorded(schedule, stretch, 0.0, 0.0)).measured.idle_share();
    ASSERT_GT(late.measured.idle_share(), ideal);
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      EXPECT_NEAR(cause(late, rank, IdleCause::kImbalance), 0.0, kNear) << schedule.name;
      EXPECT_NEAR(cause(late, rank, IdleCause::kCommunication), 0.0, kNear) << schedule.name;
      EXPECT_GT(cause(late, rank, IdleCause::kHost), 0.0) << schedule.name;
      EXPECT_NEAR(cause(far, rank, IdleCause::kImbalance), 0.0, kNear) << schedule.name;
      EXPECT_NEAR(cause(far, rank, IdleCause::kHost), 0.0, kNear) << schedule.name;
      EXPECT_GT(cause(far, rank, IdleCause::kCommunication), 0.0) << schedule.name;
    }
  }
}

TEST(PipelineReport, SplitsActivationsBetweenBothHalvesOfBackward) {
  const StageEvents events = {
      {pass(Kind::kForward, 0, 0, 0, 1, 100), pass(Kind::kForward, 0, 1, 1, 2, 100),
       pass(Kind::kBackwardInput, 0, 0, 2, 3, 75), pass(Kind::kBackwardInput, 0, 1, 3, 4, 75),
       pass(Kind::kBackwardWeight, 0, 0, 4, 5, -75), pass(Kind::kBackwardWeight, 0, 1, 5, 6, -75)}};
  Schedule schedule{.name = "mine", .stages = 1, .micro_batches = 2, .ranks = {{}}};
  for (const StageEvent& event : events[0]) schedule.ranks[0].push_back(event.pass());
  const PipelineReport report = report_step(schedule, events);
  EXPECT_EQ(report.measured.ranks[0].peak_bytes, 200);
  EXPECT_NEAR(report.costs.between_halves_bytes[0], 75.0, kNear);
  EXPECT_EQ(report.predicted.ranks[0].peak_bytes, 200);
  EXPECT_NEAR(report.measured.ranks[0].idle, 0.0, kNear);
}

TEST(PipelineReport, OfOneDeviceForStudyIsSimulatedForThatOfMany) {
  for (const Schedule& schedule : some_schedules()) {
    const Schedule one = on_one_rank(schedule);
    const Simulation serial = simulate(one);
    EXPECT_DOUBLE_EQ(serial.makespan, 3.0 * static_cast<double>(schedule.stages * schedule.micro_batches))
        << schedule.name;
    const StageEvents events = recorded(
        one, [](const StagePass& pass) { return pass.kind == Kind::kBackward ? 2.0 : 1.0; }, 0.0, 0.0);
    const PipelineReport report = report_step(one, events, schedule);
    EXPECT_NEAR(report.predicted.seconds, simulate(schedule).makespan, kNear) << schedule.name;
    EXPECT_EQ(report.predicted.ranks.size(), schedule.ranks.size());
    EXPECT_NEAR(report.measured.idle_share(), 0.0, kNear);
  }
}

TEST(PipelineReport, RefusesEventsOfAnotherSchedule) {
  const Schedule schedule = make_schedule(ScheduleName::k1F1B, {2, 1});
  StageEvents events = one_micro_batch();
  std::swap(events[1][1], events[1][2]);
  EXPECT_THROW(report_step(schedule, events), LogicError);
  events = one_micro_batch();
  events[1].pop_back();
  events[1].pop_back();
  EXPECT_THROW(report_step(schedule, events), LogicError) << "a pass is missing";
  events.pop_back();
  EXPECT_THROW(report_step(schedule, events), LogicError) << "a rank is missing";
}

TEST(ClockOffsets, LieBetweenWhatMeetingsAllow) {
  // Clock 1 is 100 ahead. It is known as well as the shortest meeting was long.
  const std::vector<std::vector<Meeting>> seen = {{{0, 2}, {10, 10.5}, {20, 23}},
                                                  {{100.5, 102}, {110.25, 110.5}, {121, 122.5}}};
  const auto offsets = clock_offsets(seen);
  ASSERT_EQ(offsets.size(), 2u);
  EXPECT_EQ(offsets[0].seconds, 0.0);
  EXPECT_LE(std::abs(offsets[1].seconds + 100.0), offsets[1].error + kNear);
  EXPECT_NEAR(offsets[1].seconds, 0.5 * (10 - 110.5 + 10.5 - 110.25), kNear);
  EXPECT_NEAR(offsets[1].error, 0.5 * (10.5 - 110.25 - (10 - 110.5)), kNear);
}

}  // namespace
}  // namespace trireme::plan
