// What joining, making a group and reporting a failure cost the process that hosts the store.
#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <numeric>
#include <thread>

#include "tests/comm/stores.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/comm/meeting.h"
#include "trireme/comm/progress_board.h"

namespace trireme {
namespace {

using Counts = std::map<std::string, int64_t>;
using comm::World;
using test::CountingStore;

int64_t total(const Counts& counts) {
  int64_t sum = 0;
  for (const auto& [name, calls] : counts) sum += calls;
  return sum;
}

std::vector<int64_t> ranks_below(int64_t size) {
  std::vector<int64_t> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Joining and making one group.
Counts calls_of_set_up(int64_t size) {
  const auto store = c10::make_intrusive<CountingStore>();
  Counts counts;
  std::atomic<int64_t> connected = 0;
  test::run_ranks(
      size,
      [&](std::shared_ptr<World> world) {
        const auto group = world->make_group("all", ranks_below(size));
        at::Tensor one = at::ones({1});
        group->all_reduce(one, comm::ReduceOp::kSum);
        EXPECT_EQ(one.item<float>(), static_cast<float>(size));
        if (++connected == size) counts = store->take_counts();
        group->barrier();
      },
      60.0, 90.0, /*peer_memory=*/false, store);
  return counts;
}

/// A report of every rank about the same operation.
Counts calls_of_reports(int64_t size) {
  const auto store = c10::make_intrusive<CountingStore>();
  for (int64_t rank = 0; rank < size; ++rank) comm::ProgressBoard::enter(*store, rank);
  store->take_counts();
  std::vector<std::thread> threads;
  std::latch all_here(size);
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      comm::ProgressBoard board(store, rank);
      all_here.arrive_and_wait();
      const std::string text = board.report_failure({"all_reduce", 7, "dp"}, ranks_below(size)).text;
      EXPECT_NE(text.find("in it too"), std::string::npos) << text;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return store->take_counts();
}

TEST(StoreCalls, JoiningAndMakingAGroupTakeAConstantNumberPerRank) {
  constexpr int64_t kMostPerRank =
      20;  // greetings, offers, addresses, "connected": 4 calls each, 2 entries, who it is, and how many are
  for (const int64_t size : {2, 4, 8, 16, 32, 64}) {
    const Counts counts = calls_of_set_up(size);
    EXPECT_LE(total(counts), kMostPerRank * size + 16) << size << " ranks: " << fmt::format("{}", counts);
  }
}

TEST(StoreCalls, ManyRanksMeetWhileOtherWorkTakesAllCores) {
  constexpr int64_t kRanks = 512, kMostPerRank = 14;
  const auto store = c10::make_intrusive<CountingStore>();
  std::atomic<bool> over = false;
  std::vector<std::thread> busy;
  for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i) {
    busy.emplace_back([&] {
      while (!over) {
      }
    });
  }
  std::atomic<int64_t> met = 0;
  test::run_ranks(
      kRanks,
      [&](std::shared_ptr<World> world) {
        const std::vector<std::string> texts = world->gather_texts("who", std::to_string(world->rank()));
        met += texts.at(static_cast<size_t>(kRanks - 1)) == std::to_string(kRanks - 1);
      },
      90.0, 90.0, /*peer_memory=*/false, store);
  over = true;
  for (std::thread& thread : busy) thread.join();
  EXPECT_EQ(met, kRanks);
  const Counts counts = store->take_counts();
  EXPECT_LE(total(counts), kMostPerRank * kRanks) << fmt::format("{}", counts);
}

TEST(StoreCalls, ReportsOfAFailureTakeABoundedNumberPerRank) {
  constexpr int64_t kMostPerRank = 26;  // an entry three times, and one look in 100 ms for at most 2 s
  for (const int64_t size : {2, 8, 64}) {
    const Counts counts = calls_of_reports(size);
    EXPECT_LE(total(counts), kMostPerRank * size) << size << " ranks: " << fmt::format("{}", counts);
  }
}

TEST(Entries, ComeBackWholeAndADamagedEndIsLeftOut) {
  const std::string binary("a\n1 2\n\0z", 8);
  const std::string log = comm::to_entry(3, "three") + comm::to_entry(1, binary) + comm::to_entry(2, "");
  const std::map<int64_t, std::string> all = {{1, binary}, {2, ""}, {3, "three"}};
  EXPECT_EQ(comm::parse_entries(log), all);
  for (size_t size = 0; size < log.size(); ++size)
    EXPECT_LT(comm::parse_entries(log.substr(0, size)).size(), 3u);
  EXPECT_TRUE(comm::parse_entries("three 5\nthree").empty());
  EXPECT_TRUE(comm::parse_entries("3 99999999999999999999\nx").empty());
}

TEST(Meeting, ARankThatComesTwiceDoesNotStandInForAnother) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  comm::Meeting meeting{
      .op = "test", .where = "here", .place = "place", .ranks = {0, 1, 2}, .timeout_s = 0.2};
  for (const int64_t rank : {0, 1, 1}) {
    meeting.rank = rank;
    EXPECT_THROW(meet(*store, meeting, "text"), CommError) << "rank 2 is missing";
  }
  meeting.rank = 2;
  EXPECT_EQ(meet(*store, meeting, "last"), (std::vector<std::string>{"text", "text", "last"}));
}

}  // namespace
}  // namespace trireme
