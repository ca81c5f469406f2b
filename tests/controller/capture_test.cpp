// Steps that workers know: what they compute, and when a call is none of them.
#include "trireme/gt/capture.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/controller/one_worker.h"
#include "tests/controller/trained_mini_gpt.h"
#include "tests/support/refusal.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

gt::Tensor some_rows(int64_t rows) {
  return gt::tensor(std::vector<float>(static_cast<size_t>(4 * rows), 0.5F), {rows, 4});
}

TEST(Capture, FollowsWhatTheFunctionDoesAndSaysWhyItIsNoReplay) {
  with_one_worker([] {
    gt::Tensor weight = gt::ones({4, 4});
    gt::Capture capture;
    const auto value = [&](int64_t rows, double by, bool squared) {
      gt::Value fetched;
      capture([&] {
        gt::Tensor x = gt::matmul(some_rows(rows), weight) * by;
        if (squared) x = gt::square(x);
        fetched = x.sum().fetch();
      });
      return fetched.floats()[0];
    };
    EXPECT_NE(capture.why(), "");
    EXPECT_EQ(value(2, 1, false), 16);
    EXPECT_EQ(capture.replays(), 0);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(value(2, 1, false), 16);
    EXPECT_GE(capture.replays(), 1);
    EXPECT_EQ(capture.why(), "");
    const int64_t before = capture.replays();
    // A factor that has never changed is no argument yet, and one from then on.
    EXPECT_EQ(value(2, 3, false), 48);
    EXPECT_EQ(capture.replays(), before);
    EXPECT_NE(capture.why().find("changed for the first time"), std::string::npos) << capture.why();
    EXPECT_EQ(value(2, 5, false), 80);
    EXPECT_EQ(value(2, 0.5, false), 8);
    EXPECT_EQ(capture.replays(), before + 2);
    // Other shapes, and other instructions.
    EXPECT_EQ(value(3, 2, false), 48);
    EXPECT_EQ(capture.replays(), before + 2);
    EXPECT_NE(capture.why(), "");
    EXPECT_EQ(value(3, 2, true), 192);
    EXPECT_NE(capture.why().find("square"), std::string::npos) << capture.why();
    for (int i = 0; i < 2; ++i) EXPECT_EQ(value(3, 2, true), 192);
    EXPECT_EQ(capture.why(), "");
    // Both that were known are known still, whatever came between.
    EXPECT_EQ(value(2, 5, false), 80);
    EXPECT_EQ(value(3, 2, true), 192);
    EXPECT_EQ(capture.replays(), before + 5);
  });
}

/// A tensor that is made outside has its shape in no instruction of the step.
TEST(Capture, SeesThatATensorFromOutsideLiesOtherwise) {
  with_one_worker([] {
    gt::Tensor weight = gt::ones({4, 4});
    gt::Capture capture;
    for (const int64_t rows : {2, 2, 2, 2, 3, 3, 3, 3, 2}) {
      const gt::Tensor x = some_rows(rows) + some_rows(rows);
      gt::Value fetched;
      capture([&] { fetched = gt::matmul(x, weight).sum().fetch(); });
      EXPECT_EQ(fetched.floats()[0], 16.0F * static_cast<float>(rows));
    }
    // The first call makes the weight, too. Of the others each kind is known after two, and stays known.
    EXPECT_EQ(capture.replays(), 4);
  });
}

/// Tensors that are let go between two calls are freed between them, and do not change the next one.
TEST(Capture, IsTheSameWhateverIsDoneBetween) {
  with_one_worker([] {
    gt::Tensor weight = gt::ones({4, 4});
    gt::Capture capture;
    for (int64_t step = 0; step < 12; ++step) {
      gt::Value fetched;
      capture([&] { fetched = gt::matmul(some_rows(2), weight).sum().fetch(); });
      EXPECT_EQ(fetched.floats()[0], 16);
      if (step % 3 != 0) continue;
      EXPECT_EQ(gt::matmul(some_rows(3), weight).mean().item(), 2);
    }
    EXPECT_EQ(capture.replays(), 9) << capture.why();
  });
}

/// Each takes the number of the one before, which was another step.
TEST(Capture, MayBeAsShortLivedAsOneLikes) {
  with_one_worker([] {
    const gt::Tensor small = gt::ones({4, 4}) * 1.0, large = gt::ones({6, 6}) * 1.0;
    EXPECT_EQ(small.sum().item() + large.sum().item(), 52);
    for (int64_t i = 0; i < 1100; ++i) {
      gt::Capture capture;
      gt::Value fetched;
      const gt::Tensor& weight = i % 2 == 0 ? small : large;
      for (int64_t step = 0; step < 4; ++step)
        capture([&] { fetched = (weight * static_cast<double>(i)).sum({0}).fetch(); });
      const std::vector<float> sums = fetched.floats();
      ASSERT_EQ(sums, std::vector<float>(i % 2 == 0 ? 4 : 6, static_cast<float>(i * (i % 2 == 0 ? 4 : 6))));
      ASSERT_EQ(capture.replays(), 2) << i << ": " << capture.why();
    }
  });
}

TEST(Capture, KnowsAsManyStepsAsThereAreShapes) {
  with_one_worker([] {
    const gt::Tensor weight = gt::ones({4, 4}) * 1.0;
    EXPECT_EQ(weight.sum().item(), 16);
    gt::Capture capture;
    for (int64_t step = 0; step < 40; ++step) {
      gt::Value fetched;
      const int64_t rows = 1 + step % 8;
      capture([&] { fetched = gt::matmul(some_rows(rows), weight).sum().fetch(); });
      ASSERT_EQ(fetched.floats()[0], 8.0F * static_cast<float>(rows));
    }
    EXPECT_EQ(capture.replays(), 24) << capture.why();
  });
}

/// Workers keep 1,024 steps; further ones are made as without a capture.
TEST(Capture, BeyondWhatWorkersKeepIsNoReplay) {
  with_one_worker([] {
    const gt::Tensor weight = gt::ones({4, 4}) * 1.0;
    EXPECT_EQ(weight.sum().item(), 16);
    std::vector<gt::Capture> captures(1030);
    for (gt::Capture& capture : captures) {
      gt::Value fetched;
      for (int64_t step = 0; step < 3; ++step) capture([&] { fetched = weight.sum().fetch(); });
      ASSERT_EQ(fetched.floats()[0], 16);
    }
    EXPECT_EQ(captures[1023].replays(), 1);
    EXPECT_EQ(captures[1024].replays(), 0);
    EXPECT_NE(captures[1024].why().find("as many steps"), std::string::npos) << captures[1024].why();
  });
}

TEST(Capture, EndsInOrderWhereTheFunctionThrows) {
  with_one_worker([] {
    gt::Tensor sum = gt::zeros({2, 4});
    gt::Capture capture;
    const auto add = [&](bool fails) {
      capture([&] {
        const gt::no_grad off;
        sum.add_(some_rows(2));
        if (fails) throw ConfigError("stop");
        sum.add_(some_rows(2));
      });
    };
    for (int i = 0; i < 4; ++i) add(false);
    EXPECT_GT(capture.replays(), 0);
    EXPECT_THROW(add(true), ConfigError);
    EXPECT_EQ(sum.fetch().floats()[0], 4.5F);
    for (int i = 0; i < 3; ++i) add(false);
    EXPECT_EQ(sum.fetch().floats()[0], 7.5F);
    EXPECT_EQ(capture.why(), "");
  });
}

TEST(Capture, RefusesValuesWithinAndOtherCaptures) {
  with_one_worker([] {
    gt::Capture capture, inner;
    const gt::Tensor x = some_rows(2) + some_rows(2);
    test::expect_mentions(test::failure_of([&] { capture([&] { x.sum().item(); }); }), {"gt::Capture"});
    gt::Value before = x.sum().fetch();
    capture([&] { EXPECT_EQ(before.floats()[0], 8.0F); });
    test::expect_mentions(test::failure_of([&] { capture([&] { inner([] {}); }); }), {"[gt.capture]"});
    capture([] {});
    EXPECT_EQ(x.sum().item(), 8.0);
  });
}

}  // namespace
}  // namespace trireme
