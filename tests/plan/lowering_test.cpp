// Programs of all ranks against each other over a sweep of schedules, and what the checker refuses.
#include "trireme/plan/lowering.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tests/plan/schedules.h"
#include "tests/support/refusal.h"
#include "trireme/plan/spread_head.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;

/// Calls `body` with every schedule of up to 8 ranks, 16 micro-batches and 3 chunks that there is.
void for_all_schedules(const std::function<void(const Schedule&, const std::string&)>& body) {
  int64_t count = 0;
  for (const ScheduleName name : all_values<ScheduleName>()) {
    for (int64_t ranks = 1; ranks <= 8; ++ranks) {
      for (int64_t micro_batches = 1; micro_batches <= 16; ++micro_batches) {
        for (int64_t chunks = 1; chunks <= (has_chunks(name) ? 3 : 1); ++chunks) {
          Schedule schedule;
          try {
            schedule = make_schedule(name, {ranks, micro_batches, chunks});
          } catch (const ConfigError&) {
            continue;  // tests of the generators say which shapes these are
          }
          ++count;
          body(schedule,
               fmt::format("{} on {}, {} micro-batches, {} chunks", name, ranks, micro_batches, chunks));
        }
      }
    }
  }
  EXPECT_GT(count, 1500);
}

TEST(Lowering, RunsToItsEndOnAllRanksForEverySchedule) {
  for_all_schedules([](const Schedule& schedule, const std::string& what) {
    for (const int64_t ahead : {0, 1, 4})
      EXPECT_NO_THROW(check_programs(schedule, lower_all(schedule, ahead))) << what << ", ahead " << ahead;
  });
}

TEST(Lowering, OfAllRanksIsThatOfEach) {
  const Schedule plain = make_schedule(ScheduleName::kInterleaved1F1B, {3, 6, 2});
  for (const Schedule& schedule : {plain, spread_head(plain, with_head_parts(plain, {}, 2.0, 1.0, 0.0))}) {
    for (const int64_t ahead : {0, 2}) {
      const std::vector<StageActions> all = lower_all(schedule, ahead);
      for (int64_t rank = 0; rank < 3; ++rank)
        EXPECT_EQ(stage_text(all.at(static_cast<size_t>(rank))), stage_text(lower(schedule, rank, ahead)));
    }
  }
}

/// Both ends of a boundary that send to each other at once block each other if neither has posted.
TEST(Lowering, SaysWhichSchedulesRunWhenSendsWaitForPosts) {
  const auto check = [](ScheduleName name, int64_t ranks, int64_t chunks, int64_t ahead) {
    const Schedule schedule = make_schedule(name, {ranks, 8, chunks});
    check_programs(schedule, lower_all(schedule, ahead), Sends::kWhenPosted);
  };
  for (const ScheduleName name : {ScheduleName::kGpipe, ScheduleName::k1F1B, ScheduleName::kZbV})
    EXPECT_NO_THROW(check(name, 4, 1, 0)) << plan::name(name);
  for (const ScheduleName name : {ScheduleName::kDualPipe, ScheduleName::kDualPipeV}) {
    EXPECT_NO_THROW(check(name, 4, 1, 1)) << plan::name(name);
    EXPECT_THROW(check(name, 4, 1, 0), LogicError) << plan::name(name);
  }
  EXPECT_THROW(check(ScheduleName::kLoopedBfs, 2, 2, 1), LogicError);
}

TEST(Lowering, RunsForwardPassesAloneOfAnyNumberOfMicroBatches) {
  for (const ScheduleName name : all_values<ScheduleName>()) {
    for (const int64_t ranks : {1, 2, 4, 6}) {
      Schedule schedule;
      try {
        schedule = make_schedule(name, {ranks, 4 * ranks, has_chunks(name) ? 3 : 1});
      } catch (const ConfigError&) {
        continue;
      }
      for (const int64_t micro_batches : {1, 2, 3, 7, 12}) {
        const Schedule forwards = forward_only(schedule, micro_batches);
        std::vector<StageActions> programs;
        for (int64_t rank = 0; rank < ranks; ++rank) programs.push_back(lower_forward(forwards, rank));
        EXPECT_NO_THROW(check_programs(forwards, programs))
            << plan::name(name) << " on " << ranks << " ranks, " << micro_batches << " micro-batches";
        int64_t passes = 0;
        for (const auto& rank : forwards.ranks) passes += std::ssize(rank);
        EXPECT_EQ(passes, schedule.stages * micro_batches);
      }
    }
  }
}

using Sent = std::tuple<Message, int64_t, int64_t>;

std::vector<Sent> messages(const StageActions& program, Kind kind, int64_t peer) {
  std::vector<Sent> found;
  for (const Action& action : program) {
    if (action.kind == kind && action.peer == peer)
      found.emplace_back(action.message, action.stage, action.micro_batch);
  }
  return found;
}

TEST(Lowering, PostsAndTakesInTheOrderOfSends) {
  for_all_schedules([](const Schedule& schedule, const std::string& what) {
    const std::vector<StageActions> programs = lower_all(schedule);
    for (size_t from = 0; from < programs.size(); ++from) {
      for (size_t to = 0; to < programs.size(); ++to) {
        const auto sent = messages(programs[from], Kind::kSend, static_cast<int64_t>(to));
        EXPECT_EQ(messages(programs[to], Kind::kPost, static_cast<int64_t>(from)), sent) << what;
        EXPECT_EQ(messages(programs[to], Kind::kRecv, static_cast<int64_t>(from)), sent) << what;
      }
    }
  });
}

TEST(Lowering, IsReadableText) {
  EXPECT_EQ(stage_text(lower(make_schedule(ScheduleName::k1F1B, {2, 2, 1}), 1)),
            "post 1F0 from 0 in 0\npost 1F1 from 0 in 1\n"
            "recv 1F0 from 0 in 0\nforward 1F0\nbackward 1B0\nsend 0B0 to 0\n"
            "recv 1F1 from 0 in 1\nforward 1F1\nbackward 1B1\nsend 0B1 to 0\n");
}

/// The gradient of 1F1B's first stage is there for as many micro-batches as it has in flight.
TEST(Lowering, UsesAsManyBuffersAsAreInFlightAndThoseAhead) {
  for (const int64_t ahead : {0, 1, 2}) {
    const StageActions one = lower(make_schedule(ScheduleName::k1F1B, {4, 16, 1}), 1, ahead);
    EXPECT_EQ(receive_buffers(one).at({1, Message::kActivation}), 3 + ahead);
    EXPECT_EQ(receive_buffers(one).at({1, Message::kGradient}), 1 + ahead);
    const StageActions all = lower(make_schedule(ScheduleName::kGpipe, {4, 16, 1}), 1, ahead);
    EXPECT_EQ(receive_buffers(all).at({1, Message::kActivation}), 16);
  }
}

TEST(Lowering, HandsOverOnARankWithoutMessages) {
  const Schedule there_and_back = make_schedule(ScheduleName::kZbV, {3, 8, 1});
  for (const Action& action : lower(there_and_back, 2)) EXPECT_FALSE(action.peer == 2);
  EXPECT_TRUE(receive_buffers(lower(there_and_back, 2)).contains({2, Message::kActivation}));
  EXPECT_FALSE(receive_buffers(lower(there_and_back, 2)).contains({3, Message::kActivation}));
  for (const Action& action : lower(make_schedule(ScheduleName::kInterleaved1F1B, {1, 4, 3}), 0))
    EXPECT_EQ(action.peer, -1);
}

TEST(Lowering, RefusesSchedulesThatCannotRun) {
  const auto lower_csv = [](const char* text) { lower(from_csv(text, Placement::kLoop, "mine"), 0); };
  test::expect_refusal([&] { lower_csv("0F0,0B0\n1F0"); }, {"rank 1 never runs 1I0"});
  test::expect_refusal([&] { lower_csv("0F0,0F0,0B0\n1F0,1B0"); }, {"rank 0 runs 0F0 twice"});
  test::expect_refusal([&] { lower_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"); }, {"deadlock"});
  test::expect_refusal(
      [] { lower(from_csv("0F0,0B0,4F0,4B0\n1F0,1B0,2F0,2B0,3F0,3B0", Placement::kV, "mine"), 0); },
      {"stage 4", "5 stages on 2 ranks", "two stages per rank"});
  EXPECT_THROW(lower(make_schedule(ScheduleName::kGpipe, {2, 2, 1}), 2), LogicError);
}

/// Changes one action of rank 1 of 1f1b on 3 ranks.
void expect_refused(const std::function<void(StageActions&)>& change, const std::string& words) {
  const Schedule schedule = make_schedule(ScheduleName::k1F1B, {3, 4, 1});
  std::vector<StageActions> programs = lower_all(schedule);
  change(programs[1]);
  test::expect_refusal([&] { check_programs(schedule, programs); }, {words});
}

StageActions::iterator first(StageActions& program, Kind kind, Message message = Message::kActivation) {
  return std::ranges::find_if(
      program, [&](const Action& action) { return action.kind == kind && action.message == message; });
}

TEST(Lowering, CheckerNamesWhatIsWrong) {
  expect_refused([](StageActions& program) { program.erase(first(program, Kind::kSend)); },
                 "rank 2: 'recv 2F0 from 1 in 0' is matched by 'send 2F1 to 2'");
  expect_refused(
      [](StageActions& program) {
        program.insert(first(program, Kind::kSend), *first(program, Kind::kSend));
      },
      "rank 1: 'send 2F0 to 2' sends what has not been computed");
  expect_refused([](StageActions& program) { program.erase(first(program, Kind::kRecv)); },
                 "rank 1: 'forward 1F0' has no input");
  expect_refused([](StageActions& program) { program.erase(first(program, Kind::kPost)); },
                 "rank 1: 'recv 1F0 from 0 in 0' is not the oldest post");
  expect_refused([](StageActions& program) { first(program, Kind::kPost)[1].buffer = 0; },
                 "'post 1F1 from 0 in 0' uses a buffer that is in use");
  expect_refused([](StageActions& program) { program.resize(program.size() - 2); }, "deadlock");
  expect_refused(
      [](StageActions& program) {
        std::rotate(first(program, Kind::kRecv, Message::kGradient),
                    first(program, Kind::kRecv, Message::kGradient) + 1, program.end());
      },
      "has no input");
}

}  // namespace
}  // namespace trireme::plan
