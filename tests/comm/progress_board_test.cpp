// What a rank publishes, and the words that others make of it.
#include "trireme/comm/progress_board.h"

#include <gtest/gtest.h>
#include <time.h>

#include <array>
#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

using State = ProgressBoard::State;
using Sighting = ProgressBoard::Sighting;

const Operation kMine{"all_gather", 41, "dp"};
constexpr double kNow = 1000.0;

std::string words(const Sighting& seen) {
  return describe_sighting(2, to_text(seen), kMine, kNow);
}

TEST(ProgressBoard, DescribesWhereAnotherRankIs) {
  EXPECT_EQ(describe_sighting(2, "", kMine, kNow), "rank 2 has not been seen since it joined");
  EXPECT_EQ(describe_sighting(2, "", kMine, kNow, {}, 60),
            "rank 2 has not published where it is, which ranks do once a second; this rank completed #60 of "
            "group " +
                std::string(kMine.group) + " with it");
  EXPECT_EQ(words({State::kDone, 40, "broadcast", "dp", 937.0}),
            "rank 2 was last seen before all_gather #41 of group dp (63 s ago)");
  EXPECT_EQ(words({State::kInside, 40, "broadcast", "dp", 937.0}),
            "rank 2 was last seen in broadcast #40 of group dp (63 s ago)");
  EXPECT_EQ(words({State::kInside, 41, "broadcast", "dp", 998.0}),
            "rank 2 was last seen in broadcast #41 of group dp (2 s ago)");
  EXPECT_EQ(words({State::kDone, 7, "barrier", "all", 990.0}),
            "rank 2 was last seen after barrier #7 of group all (10 s ago)");
  EXPECT_EQ(words({State::kFailed, 7, "barrier", "all", 990.0}),
            "rank 2 failed in barrier #7 of group all (10 s ago)");
  EXPECT_EQ(words({State::kLeft, 7, "barrier", "all", 990.0}), "rank 2 left the job 10 s ago");
}

TEST(ProgressBoard, TellsWhatRanksWorkOn) {
  const Sighting seen{State::kInside, 41, "all_gather", "dp", 990.0, "blocks.2"};
  const auto words_for = [&](const char* subject) {
    return describe_sighting(2, to_text(seen), kMine, kNow, subject);
  };
  EXPECT_EQ(words_for("blocks.2"), "");
  EXPECT_EQ(words_for("blocks.1"),
            "rank 2 was last seen in all_gather #41 for blocks.2 of group dp (10 s ago)");
}

TEST(ProgressBoard, RanksInDifferentOperationsHaveDiverged) {
  const auto diverged = [](const std::vector<std::string>& texts) {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    std::vector<int64_t> ranks = {0};
    for (const std::string& text : texts) {
      store->set(fmt::format("progress/{}", ranks.size()), text);
      ranks.push_back(static_cast<int64_t>(ranks.size()));
    }
    ProgressBoard::enter(*store, 0);
    return ProgressBoard(store, 0).report_failure(kMine, ranks, "blocks.1").cause ==
           ProgressBoard::Cause::kDiverged;
  };
  const auto in = [](State state, const char* operation, const char* subject) {
    return to_text({state, 41, operation, "dp", kNow, subject});
  };
  const std::string same = in(State::kInside, "all_gather", "blocks.1");
  EXPECT_TRUE(diverged({in(State::kInside, "barrier", "")}));
  EXPECT_TRUE(diverged({same, in(State::kFailed, "all_gather", "blocks.2")}));
  EXPECT_FALSE(diverged({same, same})) << "nobody is elsewhere";
  EXPECT_FALSE(diverged({in(State::kInside, "barrier", ""), in(State::kDone, "all_gather", "")}))
      << "one is slow";
  EXPECT_FALSE(diverged({in(State::kInside, "barrier", ""), in(State::kLeft, "all_gather", "")}))
      << "one left";
  EXPECT_FALSE(diverged({to_text({State::kInside, 40, "all_gather", "dp", kNow, ""})}))
      << "last seen in what is over, it has been silent since";
  EXPECT_FALSE(diverged({in(State::kInside, "barrier", ""), ""})) << "one was never seen";
}

/// Of ranks 0 and 1 in one group, where the second is in another one.
TEST(ProgressBoard, ARankInAGroupWithOthersMayWaitForOneOfThose) {
  using Cause = ProgressBoard::Cause;
  const auto cause = [](State state, const std::vector<int64_t>& other, int64_t passed = 0) {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    ProgressBoard::enter(*store, 0);
    store->set("progress/1", to_text({state, 7, "all_gather", "pp", kNow, ""}));
    ProgressBoard board(store, 0);
    if (!other.empty()) board.note_group("pp", other);
    if (passed > 0) board.note(State::kDone, {"all_gather", passed, "pp"});
    return board.report_failure(kMine, {0, 1}).cause;
  };
  EXPECT_EQ(cause(State::kInside, {}), Cause::kElsewhere) << "of which this rank is none";
  EXPECT_EQ(cause(State::kFailed, {0, 2}), Cause::kElsewhere) << "one of the same name";
  EXPECT_EQ(cause(State::kInside, {1, 0}), Cause::kDiverged) << "each waits for the other";
  EXPECT_EQ(cause(State::kInside, {0, 1, 2}, 6), Cause::kElsewhere);
  EXPECT_EQ(cause(State::kInside, {0, 1, 2}, 7), Cause::kMissing) << "it has been silent since";
  EXPECT_EQ(cause(State::kFailed, {0, 1, 2}, 7), Cause::kElsewhere) << "its own message says why";
}

TEST(ProgressBoard, SaysNothingOfARankInTheSameOperation) {
  EXPECT_EQ(words({State::kInside, 41, "all_gather", "dp", 990.0}), "");
  EXPECT_EQ(words({State::kFailed, 41, "all_gather", "dp", 990.0}), "");
}

TEST(ProgressBoard, TextComesBackWhole) {
  const Sighting seen{State::kInside, 41, "all_gather", "a name with spaces", 1763683200.125, "a b"};
  const std::optional<Sighting> back = parse_sighting(to_text(seen));
  ASSERT_TRUE(back);
  EXPECT_EQ(back->state, seen.state);
  EXPECT_EQ(back->sequence, seen.sequence);
  EXPECT_EQ(back->operation, seen.operation);
  EXPECT_EQ(back->group, seen.group);
  EXPECT_EQ(back->subject, seen.subject);
  EXPECT_DOUBLE_EQ(back->since, seen.since);
}

constexpr std::array<const char*, 5> kNoEntries = {"x", "i", "i forty all_gather 1.0 dp",
                                                   "z 1 all_gather 1.0 dp", "i 1 all_gather 1.0"};

TEST(ProgressBoard, OtherTextIsNoEntry) {
  for (const char* text : kNoEntries) EXPECT_FALSE(parse_sighting(text)) << text;
}

TEST(ProgressBoard, ADamagedEntryIsPartOfTheReport) {
  for (const char* text : kNoEntries) {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    for (const int64_t rank : {0, 1}) ProgressBoard::enter(*store, rank);
    store->set("progress/1", std::string(text));
    ProgressBoard board(store, 0);
    EXPECT_EQ(board.report_failure(kMine, {0, 1}).text, "rank 1 left an unreadable progress entry") << text;
  }
}

TEST(ProgressBoard, HearsOfFailuresOfOthersWhenItListens) {
  constexpr auto kPeriod = std::chrono::milliseconds(50);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const int64_t rank : {0, 1, 2}) ProgressBoard::enter(*store, rank);
  ProgressBoard listener(store, 0, {.period = kPeriod, .listens = true});
  ProgressBoard failed(store, 1), deaf(store, 2, {.period = kPeriod});
  EXPECT_EQ(listener.heard_about({0, 1, 2}), "");
  failed.report_failure(kMine, {0, 1, 2});
  std::this_thread::sleep_for(4 * kPeriod);
  EXPECT_EQ(listener.heard_about({0, 1, 2}), "rank 1 failed in all_gather #41 of group dp");
  EXPECT_EQ(listener.heard_about({0, 2}), "");
  EXPECT_EQ(deaf.heard_about({0, 1, 2}), "");
}

TEST(ProgressBoard, PublishesOncePerPeriodAndOnlyChanges) {
  constexpr auto kPeriod = std::chrono::milliseconds(200);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProgressBoard board(store, 0, {.period = kPeriod});
  std::this_thread::sleep_for(kPeriod + kPeriod / 4);
  EXPECT_FALSE(store->check({"progress/0"})) << "nothing happened, nothing to publish";
  for (int64_t i = 1; i <= 1000; ++i) board.note(State::kDone, {"all_gather", i, "dp"});
  EXPECT_FALSE(store->check({"progress/0"})) << "the caller must not wait for the store";
  std::this_thread::sleep_for(2 * kPeriod);
  ASSERT_TRUE(store->check({"progress/0"}));
  const std::optional<Sighting> seen = parse_sighting(store->get_to_str("progress/0"));
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen->sequence, 1000);
}

TEST(ProgressBoard, FailureIsPublishedAtOnceAndNamesTheSilentRank) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const int64_t rank : {0, 1, 2}) ProgressBoard::enter(*store, rank);
  ProgressBoard mine(store, 0), beside(store, 1);
  std::thread other([&] { beside.report_failure(kMine, {0, 1, 2}); });
  const double started = monotonic_seconds();
  const std::string text = mine.report_failure(kMine, {0, 1, 2}).text;
  other.join();
  EXPECT_LT(monotonic_seconds() - started, 2.5);
  EXPECT_EQ(text, "rank 2 has not been seen since it joined; rank 1 is waiting in it too");
  EXPECT_TRUE(mine.failed());
}

double thread_cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

TEST(ProgressBoard, HotPathCostsLessThanTenMicroseconds) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProgressBoard board(store, 0);
  const double started = thread_cpu_seconds();
  for (int64_t i = 0; i < 10000; ++i) board.note(State::kInside, {"all_gather", i, "dp"});
  EXPECT_LT((thread_cpu_seconds() - started) / 10000, 10e-6);
}

}  // namespace
}  // namespace trireme::comm
