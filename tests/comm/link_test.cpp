// Links carry tensors in order and unchanged, however far one end is ahead of the other. Ranks as threads.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/support/spawn.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/comm/link.h"

namespace trireme {
namespace {

using comm::Link;
using comm::make_link;
using comm::World;
using test::run_ranks;

constexpr int64_t kMiB = 1 << 20;

/// (count) whose bytes depend on `seed` and the place.
at::Tensor pattern(int64_t seed, int64_t count, at::ScalarType dtype = at::kInt) {
  return (at::arange(count, at::kLong) * 2654435761 + seed * 40503).remainder(30011).to(dtype);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const auto& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "no '" << word << "' in: " << text;
}

/// Through shared memory and over TCP.
class Links : public ::testing::TestWithParam<bool> {
 protected:
  void run(int64_t ranks, const test::RankBody& body, double timeout_s = 20.0) {
    run_ranks(ranks, body, timeout_s, 90.0, GetParam());
  }
};
INSTANTIATE_TEST_SUITE_P(Comm, Links, ::testing::ValuesIn(test::kBothTransports),
                         [](const auto& tested) { return tested.param ? "Memory" : "Messages"; });

TEST_P(Links, CarryEveryDtypeAndShapeInOrder) {
  run(2, [](std::shared_ptr<World> world) {
    const auto link = make_link(*world, 0, 1);
    std::vector<at::Tensor> sent = {pattern(1, 12, at::kFloat).view({3, 4}),
                                    pattern(2, 7, at::kBFloat16),
                                    pattern(3, 1, at::kLong),
                                    at::zeros({0}),
                                    pattern(4, 5, at::kBool).view({5, 1}),
                                    at::zeros({3, 0, 2}, at::kLong),
                                    pattern(5, 100'001, at::kByte),
                                    at::scalar_tensor(2.5, at::kDouble)};
    if (world->rank() == 0) {
      int64_t bytes = 0;
      for (const at::Tensor& tensor : sent) {
        link->send(tensor);
        bytes += static_cast<int64_t>(tensor.nbytes());
      }
      link->flush();
      EXPECT_EQ(link->sent_bytes(), bytes);
      return;
    }
    for (const at::Tensor& wanted : sent) {
      const at::Tensor into = at::empty_like(wanted);
      link->post(into);
      const at::Tensor got = link->wait();
      EXPECT_TRUE(got.is_same(into));
      EXPECT_TRUE(at::equal(got, wanted)) << wanted.scalar_type() << wanted.sizes();
    }
    EXPECT_EQ(link->sent_bytes(), 0);
  });
}

TEST_P(Links, ThousandTensorsAreSentBeforeOneIsAskedFor) {
  run(2, [](std::shared_ptr<World> world) {
    constexpr int64_t kTensors = 1000;
    const auto link = make_link(*world, 1, 0);
    if (world->rank() == 1) {
      for (int64_t i = 0; i < kTensors; ++i) link->send(pattern(i, 1 + i % 257));
      world->share_from_root("sent", "");  // rank 0 asks only after this
      return link->flush();
    }
    world->share_from_root("sent", "all");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (int64_t i = 0; i < kTensors; ++i) link->post(at::empty({1 + i % 257}, at::kInt));
    for (int64_t i = 0; i < kTensors; ++i) ASSERT_TRUE(at::equal(link->wait(), pattern(i, 1 + i % 257))) << i;
  });
}

TEST_P(Links, LargeTensorsOfBothDirectionsPassEachOther) {
  run(2, [](std::shared_ptr<World> world) {
    constexpr int64_t kTensors = 4, kCount = 64 * kMiB / 4;
    const auto there = make_link(*world, 0, 1), back = make_link(*world, 1, 0);
    const auto& out = world->rank() == 0 ? there : back;
    const auto& in = world->rank() == 0 ? back : there;
    // Both have sent all before either asks for anything: more than sockets or rings hold.
    const at::Tensor base = at::arange(kCount, at::kInt);
    for (int64_t i = 0; i < kTensors; ++i) out->send(base + (i + 10 * world->rank()));
    const at::Tensor into = at::empty({kCount}, at::kInt);
    for (int64_t i = 0; i < kTensors; ++i) {
      in->post(into);
      EXPECT_TRUE(at::equal(in->wait(), base + (i + 10 * (1 - world->rank())))) << i;
    }
    out->flush();
    EXPECT_EQ(out->sent_bytes(), kTensors * 64 * kMiB);
  });
}

TEST_P(Links, TensorsPassThroughAChainAndBack) {
  run(4, [](std::shared_ptr<World> world) {
    constexpr int64_t kMicroBatches = 16, kCount = 3000;
    const int64_t rank = world->rank(), last = world->size() - 1;
    std::shared_ptr<Link> from_before, to_before, from_behind, to_behind;
    if (rank > 0) {
      from_before = make_link(*world, rank - 1, rank);
      to_before = make_link(*world, rank, rank - 1);
    }
    if (rank < last) {
      to_behind = make_link(*world, rank, rank + 1);
      from_behind = make_link(*world, rank + 1, rank);
    }
    const auto receive = [&](Link& link) {
      link.post(at::empty({kCount}, at::kLong));
      return link.wait();
    };
    for (int64_t m = 0; m < kMicroBatches; ++m) {
      const at::Tensor forward = rank == 0 ? pattern(m, kCount, at::kLong) : receive(*from_before) + 1;
      if (rank < last) to_behind->send(forward);
      if (rank == last) to_before->send(forward * 2);
    }
    for (int64_t m = 0; m < kMicroBatches && rank < last; ++m) {
      const at::Tensor backward = receive(*from_behind);
      if (rank > 0) {
        to_before->send(backward);
      } else {
        EXPECT_TRUE(at::equal(backward, (pattern(m, kCount, at::kLong) + last) * 2)) << m;
      }
    }
    if (rank > 0) to_before->flush();
    if (rank < last) to_behind->flush();
  });
}

/// What a link's thread may be writing: a program waits instead, and this test must not.
__attribute__((no_sanitize("thread"), noinline)) int32_t peek(const volatile int32_t* value) {
  return *value;
}

TEST_P(Links, TravelWhileBothHostsCompute) {
  run(2, [](std::shared_ptr<World> world) {
    constexpr int64_t kCount = 64 * kMiB / 4;
    const auto link = make_link(*world, 0, 1);
    if (world->rank() == 0) {
      link->send(pattern(7, kCount));
      const double deadline = monotonic_seconds() + 10.0;
      while (link->sent_bytes() < 64 * kMiB && monotonic_seconds() < deadline) {  // no call that waits
      }
      EXPECT_EQ(link->sent_bytes(), 64 * kMiB);
      return;
    }
    const at::Tensor into = at::zeros({kCount}, at::kInt), wanted = pattern(7, kCount);
    link->post(into);
    const double deadline = monotonic_seconds() + 10.0;
    const int32_t* const last = into.const_data_ptr<int32_t>() + kCount - 1;
    while (peek(last) == 0 && monotonic_seconds() < deadline) {
    }
    EXPECT_NE(peek(last), 0) << "it arrives without wait()";
    EXPECT_TRUE(at::equal(link->wait(), wanted));
  });
}

TEST_P(Links, ASentTensorIsKeptUntilItHasLeftAndNoLonger) {
  run(2, [](std::shared_ptr<World> world) {
    const auto link = make_link(*world, 0, 1);
    const int64_t count = 16 * kMiB / 4;
    if (world->rank() == 0) {
      std::vector<int32_t> memory(static_cast<size_t>(count), 3);
      std::atomic<bool> released = false;
      link->send(at::from_blob(
          memory.data(), {count}, [&](void*) { released = true; }, at::kInt));
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      EXPECT_FALSE(released) << "it is more than fits on the way";
      world->share_from_root("let go", "now");
      link->flush();
      EXPECT_TRUE(released);
      return;
    }
    world->share_from_root("let go", "");
    link->post(at::empty({count}, at::kInt));
    EXPECT_TRUE(at::equal(link->wait(), at::full({count}, 3, at::kInt)));
  });
}

TEST_P(Links, NothingSentIsNothingToWaitFor) {
  run(2, [](std::shared_ptr<World> world) {
    const auto link = make_link(*world, 0, 1), again = make_link(*world, 0, 1);
    link->flush();
    EXPECT_EQ(link->sent_bytes(), 0);
    if (world->rank() == 1) {
      expect_words(error_of([&] { link->wait(); }), {"[comm.recv]", "link 0->1", "post() first"});
      expect_words(error_of([&] { link->send(at::ones({1})); }), {"rank 1 is the receiver", "on rank 0"});
    } else {
      expect_words(error_of([&] { link->wait(); }), {"rank 0 is the sender", "on rank 1"});
      expect_words(error_of([&] { link->post(at::ones({1})); }), {"rank 0 is the sender", "on rank 1"});
    }
  });
}

TEST_P(Links, WhatWasSentArrivesAlthoughTheSenderHasGone) {
  run(2, [](std::shared_ptr<World> world) {
    auto link = make_link(*world, 0, 1);
    if (world->rank() == 0) {
      link->send(pattern(1, 1000));
      link.reset();
      world->share_from_root("gone", "");
      return;
    }
    world->share_from_root("gone", "");
    link->post(at::empty({1000}, at::kInt));
    EXPECT_TRUE(at::equal(link->wait(), pattern(1, 1000)));
    link->post(at::empty({1000}, at::kInt));
    expect_words(error_of([&] { link->wait(); }),
                 {"[comm.recv] recv #2 for 4000 bytes of Int (1000) of group 0->1", "lost rank 0"});
  });
}

TEST_P(Links, RefuseTensorsThatCannotTravel) {
  run(2, [](std::shared_ptr<World> world) {
    const auto link = make_link(*world, 0, 1);
    const at::Tensor turned = at::ones({2, 3}).t();
    const at::Tensor elsewhere = at::empty({2}, at::TensorOptions().device(at::kMeta));
    const auto call = [&](const at::Tensor& tensor) {
      return error_of([&] { world->rank() == 0 ? link->send(tensor) : link->post(tensor); });
    };
    expect_words(call(turned), {"strides (1, 3)", "group 0->1 is not contiguous", "contiguous()"});
    expect_words(call(elsewhere), {"is on meta", "group 0->1 is on cpu"});
    // The link is as good as before.
    if (world->rank() == 0) {
      link->send(pattern(1, 3));
      return link->flush();
    }
    link->post(at::empty({3}, at::kInt));
    EXPECT_TRUE(at::equal(link->wait(), pattern(1, 3)));
  });
}

TEST_P(Links, TheReceiverIsToldBothSizes) {
  run(2, [](std::shared_ptr<World> world) {
    const auto link = make_link(*world, 0, 1);
    if (world->rank() == 0) {
      link->send(pattern(1, 6));
      link->send(pattern(2, 4 * kMiB, at::kLong));  // more than is under way unread
      expect_words(error_of([&] { link->flush(); }), {"[comm.send] send #2", "lost rank 1"});
      return;
    }
    link->post(at::empty({6}, at::kInt));
    link->wait();
    link->post(at::empty({5}, at::kBFloat16));
    EXPECT_THROW(link->wait(), LogicError);
    expect_words(error_of([&] { link->wait(); }),
                 {"[comm.recv] recv #2 for 10 bytes of BFloat16 (5) of group 0->1",
                  "rank 0 sent 33554432 bytes of Long as #2", "the same sizes"});
  });
}

TEST_P(Links, AnEndThatWaitsInVainSaysForWhat) {
  std::atomic<bool> done = false;
  run(
      2,
      [&](std::shared_ptr<World> world) {
        constexpr double kDeadline_s = 1.0;
        const auto link = make_link(*world, 0, 1);
        if (world->rank() == 0) {
          while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          expect_words(error_of([&] {
                         for (int i = 0; i < 3; ++i) {
                           link->send(at::ones({2 * kMiB}));
                           link->flush();
                         }
                       }),
                       {"[comm.send] send #1 for 8388608 bytes of Float (2097152)", "lost rank 1",
                        "rank 1 failed in recv #1 for 16 bytes of Float (4) of group 0->1"});
          return;
        }
        link->post(at::empty({4}));
        const double started = monotonic_seconds();
        const std::string first = error_of([&] { link->wait(); });
        EXPECT_GT(monotonic_seconds() - started, kDeadline_s - 0.2);
        EXPECT_LT(monotonic_seconds() - started, kDeadline_s + 2.8);
        expect_words(first,
                     {"[comm.recv] recv #1 for 16 bytes of Float (4) of group 0->1",
                      "gave up waiting for rank 0 on rank 1", "deadline 1 s", "rank 0 has not been seen"});
        EXPECT_EQ(error_of([&] { link->post(at::empty({4})); }), first) << "a lost link keeps saying why";
        done = true;
      },
      1.0);
}

/// An end that has given up closes the link, so that the other one hears of it at once, and not at its
/// deadline.
TEST_P(Links, TheOtherEndOfALinkThatWasGivenUpDoesNotWait) {
  constexpr double kDeadline_s = 3.0;
  std::atomic<bool> given_up = false, heard = false;
  const auto until = [](const std::atomic<bool>& flag) {
    while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  };
  run(
      2,
      [&](std::shared_ptr<World> world) {
        const auto link = make_link(*world, 0, 1);
        if (world->rank() == 0) {
          until(given_up);
          const double started = monotonic_seconds();
          expect_words(error_of([&] {
                         link->send(at::ones({8 * kMiB}));
                         link->flush();
                       }),
                       {"[comm.send]", "lost rank 1"});
          EXPECT_LT(monotonic_seconds() - started, 0.5 * kDeadline_s);
          heard = true;
          return;
        }
        link->post(at::empty({4}));
        expect_words(error_of([&] { link->wait(); }), {"gave up waiting for rank 0"});
        given_up = true;
        until(heard);  // the link is still there
      },
      kDeadline_s);
}

TEST_P(Links, ASenderThatNobodyListensToWaitsOnlyInFlush) {
  constexpr double kDeadline_s = 3.0;
  std::atomic<bool> done = false;
  run(
      2,
      [&](std::shared_ptr<World> world) {
        const auto link = make_link(*world, 0, 1);
        if (world->rank() == 1) {
          while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return;
        }
        const at::Tensor tensor = at::ones({4 * kMiB});
        const double started = monotonic_seconds();
        for (int i = 0; i < 8; ++i) link->send(tensor);
        EXPECT_LT(monotonic_seconds() - started, kDeadline_s) << "the eighth waits for none of the seven";
        expect_words(error_of([&] { link->flush(); }), {"[comm.send] send #8", "gave up waiting for rank 1"});
        done = true;
      },
      kDeadline_s);
}

TEST(Links, AreBetweenTwoRanksOfTheWorld) {
  run_ranks(3, [](std::shared_ptr<World> world) {
    EXPECT_THROW(make_link(*world, 1, 1), LogicError);
    EXPECT_THROW(make_link(*world, 0, 3), LogicError);
    const int64_t me = world->rank();
    expect_words(error_of([&] { make_link(*world, (me + 1) % 3, (me + 2) % 3); }), {"only they can make it"});
  });
}

TEST(Links, MakingOneAloneNamesTheRankThatDidNotCome) {
  std::atomic<bool> done = false;
  run_ranks(
      2,
      [&](std::shared_ptr<World> world) {
        if (world->rank() == 1) {
          while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          return;
        }
        expect_words(error_of([&] { make_link(*world, 0, 1); }), {"[comm.make_link]", "link 0->1", "rank 1"});
        done = true;
      },
      0.5);
}

}  // namespace
}  // namespace trireme
