// No call hangs: every wait has a deadline and says who is missing. Ranks as threads.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <regex>
#include <thread>
#include <utility>

#include "tests/comm/stores.h"
#include "tests/support/spawn.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/comm/bounded_call.h"
#include "trireme/comm/bounded_store.h"
#include "trireme/comm/meeting.h"

namespace trireme {
namespace {

using comm::ReduceOp;
using comm::World;
using test::run_ranks;

/// The message of the CommError that `call` throws.
template <typename Call>
std::string comm_error(const Call& call) {
  try {
    call();
  } catch (const CommError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no CommError was thrown";
  return {};
}

void expect_mentioned(const std::string& text, const std::vector<std::string>& words) {
  for (const auto& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "no '" << word << "' in: " << text;
}

/// With and without peer memory.
class Transport : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Deadline, Transport, ::testing::ValuesIn(test::kBothTransports),
                         [](const auto& tested) { return tested.param ? "PeerMemory" : "Messages"; });

TEST_P(Transport, NamesTheRankThatNeverEntersACollective) {
  constexpr double kDeadline_s = 2.0;
  std::atomic<int> failed = 0;
  run_ranks(
      3,
      [&](std::shared_ptr<World> world) {
        const auto group = world->make_group("dp", {0, 1, 2});
        at::Tensor shard = at::ones({4}), full = at::zeros({12});
        group->all_gather(full, shard);
        if (world->rank() == 2) {
          while (failed < 2) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return;
        }
        const double started = monotonic_seconds();
        const std::string error = comm_error([&] { group->all_gather(full, shard); });
        const double waited = monotonic_seconds() - started;
        ++failed;
        EXPECT_GT(waited, kDeadline_s - 0.3);
        EXPECT_LT(waited, kDeadline_s + 2.8) << "the deadline, and up to 2 s to hear the others";
        expect_mentioned(error, {"[comm.all_gather]", "all_gather #2 of group dp",
                                 "rank 2 was last seen before all_gather #2", "deadline 2 s"});
        EXPECT_EQ(error.find("rank 1 was last seen"), std::string::npos) << error;
      },
      kDeadline_s, 90.0, GetParam());
}

TEST_P(Transport, ARankThatLeavesFailsTheOthersFast) {
  run_ranks(
      3,
      [](std::shared_ptr<World> world) {
        {
          const auto group = world->make_group("dp", {0, 1, 2});
          at::Tensor tensor = at::ones({4});
          group->all_reduce(tensor, ReduceOp::kSum);
          if (world->rank() != 1) {
            const double started = monotonic_seconds();
            expect_mentioned(comm_error([&] { group->all_reduce(tensor, ReduceOp::kSum); }),
                             {"all_reduce #2 of group dp", "lost a peer", "rank 1 left the job"});
            EXPECT_LT(monotonic_seconds() - started, 5.0) << "far below the deadline of 60 s";
          }
        }
        world.reset();
      },
      60.0, 90.0, GetParam());
}

TEST_P(Transport, AFailedGroupKeepsSayingWhy) {
  run_ranks(
      2,
      [](std::shared_ptr<World> world) {
        auto group = world->make_group("dp", {0, 1});
        if (world->rank() == 1) return;
        at::Tensor tensor = at::ones({4});
        const std::string first = comm_error([&] { group->all_reduce(tensor, ReduceOp::kSum); });
        EXPECT_EQ(comm_error([&] { group->barrier(); }), first);
        EXPECT_EQ(comm_error([&] { group->check(); }), first);
        EXPECT_EQ(comm_error([&] { group->symmetric_empty(4, at::kFloat); }), first);
        EXPECT_EQ(tensor.size(0), 4);
      },
      5.0, 90.0, GetParam());
}

TEST(Deadline, RecvWithoutASenderNamesTheSender) {
  std::atomic<bool> done = false;
  run_ranks(
      2,
      [&](std::shared_ptr<World> world) {
        const auto group = world->make_group("pp", {0, 1});
        at::Tensor tensor = at::ones({4});
        if (world->rank() == 0) {
          while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return;
        }
        expect_mentioned(comm_error([&] { group->recv(tensor, 0); }),
                         {"recv #1 of group pp", "rank 0 has not been seen"});
        done = true;
      },
      1.0);
}

TEST(Deadline, RootNamesTheRankThatNeverEnters) {
  using Call = std::function<void(comm::Group&, at::Tensor&, at::Tensor&)>;
  const std::pair<const char*, Call> calls[] = {
      {"reduce", [](auto& group, auto& full, auto&) { group.reduce(full, ReduceOp::kSum, 0); }},
      {"gather", [](auto& group, auto& full, auto& part) { group.gather(full, part, 0); }},
      {"scatter", [](auto& group, auto& full, auto& part) { group.scatter(part, full, 1); }}};
  for (const auto& [name, call] : calls) {
    std::atomic<bool> done = false;
    run_ranks(
        2,
        [&, name = name, &call = call](std::shared_ptr<World> world) {
          const auto group = world->make_group("dp", {0, 1});
          at::Tensor full = at::ones({8}), part = at::ones({4});
          if (world->rank() == 1) {
            while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(20));
            return;
          }
          const std::string error = comm_error([&] { call(*group, full, part); });
          done = true;
          expect_mentioned(error, {std::string(name) + " #1 of group dp", "rank 1 has not been seen"});
        },
        1.0);
  }
}

TEST(Deadline, JoiningNamesTheMissingRanks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const double started = monotonic_seconds();
  const std::string error = comm_error([&] { World::join_store(store, 1, 4, c10::kCPU, 0.5); });
  EXPECT_LT(monotonic_seconds() - started, 2.0);
  expect_mentioned(error, {"[comm.join]", "rank 1", "ranks 0, 2, 3 of 4"});
}

TEST(Deadline, MakingAGroupNamesTheMissingRank) {
  std::atomic<bool> done = false;
  run_ranks(
      2,
      [&](std::shared_ptr<World> world) {
        if (world->rank() == 1) {
          while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return;
        }
        expect_mentioned(comm_error([&] {
                           world->make_group("tp", {0, 1});
                         }),
                         {"[comm.make_group]", "group tp", "rank 1 of 2"});
        done = true;
      },
      0.5);
}

/// Lets two readers of the addresses of a new group pass, of which the first only counts who has come; the
/// others wait, so that they do not connect, until release().
class StallingStore final : public c10d::HashStore {
 public:
  std::vector<uint8_t> get(const std::string& key) override {
    if (key.ends_with("/connect/0/entries") && ++readers_ > 2) {
      while (!released_) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return HashStore::get(key);
  }
  void release() { released_ = true; }

 private:
  std::atomic<int> readers_ = 0;
  std::atomic<bool> released_ = false;
};

TEST(Deadline, ConnectingAGroupEndsWhenTheOthersDoNotConnect) {
  constexpr double kDeadline_s = 1.0;
  const auto store = c10::make_intrusive<StallingStore>();
  std::atomic<bool> first = true;
  std::atomic<int> say_how_long = 0;
  run_ranks(
      6,
      [&](std::shared_ptr<World> world) {
        const double started = monotonic_seconds();
        const std::string error = comm_error([&] { world->make_group("dp", {0, 1, 2, 3, 4, 5}); });
        std::smatch waited;
        if (std::regex_search(error, waited, std::regex(R"( after (\d+\.\d) s \(deadline 1 s\))"))) {
          EXPECT_LE(std::stod(waited[1]), monotonic_seconds() - started + 0.1);
          ++say_how_long;
        }
        if (!first.exchange(false)) return;
        EXPECT_LT(monotonic_seconds() - started, kDeadline_s + 3.5);
        expect_mentioned(error, {"[comm.make_group]", "group dp"});
        store->release();
      },
      kDeadline_s, 90.0, /*peer_memory=*/false, store);
  EXPECT_GT(say_how_long, 0);
}

TEST(BoundedCall, GivesUpAtItsDeadlineOrWhenThePeerIsLost) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  const auto stuck = [released] { released.wait(); };
  EXPECT_EQ(comm::call_bounded(stuck, 0.3, [] { return std::string(); }), "passed its deadline");
  EXPECT_EQ(comm::call_bounded(stuck, 300.0, [] { return std::string("rank 1 has died"); }),
            "lost a peer: rank 1 has died");
  release.set_value();
}

TEST(BoundedCall, ThrowsWhatTheCallThrowsAndReturnsWithIt) {
  const auto nobody = [] { return std::string(); };
  EXPECT_THROW(comm::call_bounded([] { throw CommError("lost"); }, 20.0, nobody), CommError);
  const auto done = std::make_shared<int>(0);
  EXPECT_EQ(comm::call_bounded([done] { *done = 1; }, 20.0, nobody), "");
  EXPECT_EQ(*done, 1);
}

TEST(Deadline, SharingFromARootThatIsSilentNamesTheKey) {
  std::atomic<bool> done = false;
  run_ranks(
      2,
      [&](std::shared_ptr<World> world) {
        if (world->rank() == 0) {
          while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return;
        }
        expect_mentioned(comm_error([&] { world->share_from_root("run_name", ""); }),
                         {"[comm.share_from_root]", "'run_name'", "rank 0 has not been seen"});
        done = true;
      },
      0.5);
}

/// A store that stops answering while ranks wait for each other.
class Frozen : public Transport {};
INSTANTIATE_TEST_SUITE_P(Deadline, Frozen, ::testing::ValuesIn(test::kBothTransports),
                         [](const auto& tested) { return tested.param ? "PeerMemory" : "Messages"; });

TEST_P(Frozen, AStoreThatIsSilentDoesNotHoldTheReportOfATimeout) {
  constexpr double kDeadline_s = 1.0;
  const auto store = c10::make_intrusive<test::FreezingStore>();
  std::atomic<int> failed = 0;
  run_ranks(
      3,
      [&](std::shared_ptr<World> world) {
        const auto group = world->make_group("dp", {0, 1, 2});
        at::Tensor tensor = at::ones({4});
        group->barrier();
        if (world->rank() == 0) {
          store->freeze();
          while (failed < 2) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return;
        }
        const double started = monotonic_seconds();
        const std::string error = comm_error([&] { group->all_reduce(tensor, ReduceOp::kSum); });
        EXPECT_LT(monotonic_seconds() - started, kDeadline_s + 3.5);
        expect_mentioned(error,
                         {"all_reduce #2 of group dp", "the store is lost", "did not answer", "hangs"});
        ++failed;
      },
      kDeadline_s, 60.0, GetParam(), store);
  store->thaw();
}

TEST(Deadline, MakingAGroupEndsWhenTheStoreIsSilent) {
  const auto store = c10::make_intrusive<test::FreezingStore>();
  std::atomic<int> arrived = 0;
  run_ranks(
      2,
      [&](std::shared_ptr<World> world) {
        if (++arrived == 2) store->freeze();
        while (arrived < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        const double started = monotonic_seconds();
        const std::string error = comm_error([&] {
          world->make_group("dp", {0, 1});
          world->make_group("tp", {0, 1});
        });
        EXPECT_LT(monotonic_seconds() - started, 1.0 + comm::kStoreAnswer_s + 2.0);
        expect_mentioned(error, {"[comm.make_group]", "connection to the store", "reachable"});
      },
      1.0, 60.0, true, store);
  store->thaw();
}

TEST(Join, RefusesARankOfAnotherBuild) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::thread other([&] {
    const comm::Meeting meeting{
        .op = "comm.join", .where = "here", .place = "arrived", .ranks = {0, 1}, .rank = 1, .timeout_s = 5.0};
    comm::meet(*store, meeting, "trireme 99.0, torch 1.0\n- 1 1");
  });
  try {
    World::join_store(store, 0, 2, c10::kCPU, 5.0);
    ADD_FAILURE() << "a mixture of builds was accepted";
  } catch (const EnvironmentError& error) {
    expect_mentioned(error.what(), {"rank 1 runs trireme 99.0, torch 1.0", "same build"});
  }
  other.join();
}

}  // namespace
}  // namespace trireme
