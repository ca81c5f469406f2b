// Failures on the other side, and mistakes on this one, as a client learns of them; with real processes.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <fstream>

#include "tests/controller/served.h"
#include "tests/support/refusal.h"
#include "trireme/base/error.h"
#include "trireme/gt/nn.h"
#include "trireme/gt/schedule.h"
#include "trireme/gt/signal.h"
#include "trireme/gt/workers.h"

namespace trireme {
namespace {

TEST(Failures, AnInstructionThatFailsIsNamedToTheClient) {
  const Served served(2);
  const gt::Workers workers(served.program(), {});
  const gt::Tensor table = gt::randn({4, 3});
  const std::string message = test::failure_of([&] {
    const gt::Tensor rows = gt::nn::functional::embedding(gt::tensor(std::vector<int64_t>{1, 9}, {2}), table);
    rows.fetch().floats();
  });
  test::expect_mentions(message, {"worker", "embedding", "9"});
  EXPECT_FALSE(test::failure_of([&] { table.fetch().floats(); }).empty()) << "the session is over";
}

TEST(Failures, AWorkerThatIsKilledIsNamedToTheClientSoon) {
  const Served served(2);
  const gt::Workers workers(served.program(), {});
  const gt::Tensor ones = gt::ones({2, 2});
  EXPECT_EQ(ones.sum().item(), 4);
  const auto begin = std::chrono::steady_clock::now();
  ::kill(served.pid_of(1), SIGKILL);
  const std::string message = test::failure_of([&] {
    for (int i = 0; i < 1000; ++i) ones.sum().item();
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  test::expect_mentions(message, {"worker 1"});
  EXPECT_LT(seconds.count(), 5.0);
}

TEST(Failures, AStoppedWorkerIsNamedToTheClient) {
  const Served served(2);
  const gt::Workers workers(served.program(), {});
  const gt::Tensor ones = gt::ones({2, 2});
  EXPECT_EQ(ones.sum().item(), 4);
  ::kill(served.pid_of(0), SIGSTOP);
  const std::string message = test::failure_of([&] { (ones + ones).sum().item(); });
  test::expect_mentions(message, {"worker 0"});
  ::kill(served.pid_of(0), SIGCONT);
}

/// Mistakes are errors of the line that has them, before anything is sent.
TEST(Failures, MistakesAreErrorsOfTheirLines) {
  const Served served(1);
  const gt::Workers workers(served.program(), {});
  const gt::Tensor a = gt::randn({2, 3}), b = gt::randn({2, 3});
  test::expect_mentions(test::failure_of([&] { gt::matmul(a, b); }),
                        {"3 columns", "2 rows", "lost_worker_test.cpp:"});
  test::expect_mentions(test::failure_of([&] { a.item(); }), {"one element"});
  test::expect_mentions(test::failure_of([&] {
                          gt::tensor(std::vector<float>{1, 2}, {3});
                        }),
                        {"8 bytes", "12"});
  gt::Tensor whole = gt::full({2, 2}, 3), row = whole.slice(0, 0, 1);
  test::expect_mentions(test::failure_of([&] { whole.add_(whole); }),
                        {"memory another one shares", "lost_worker_test.cpp:"});
  test::expect_mentions(test::failure_of([&] { row.add_(row); }), {"memory another one shares"});
  row = {};
  whole.add_(whole);
  EXPECT_EQ(whole.sum().item(), 24) << "the view has gone";
  EXPECT_EQ((a - a).sum().item(), 0) << "the session goes on";
  test::expect_mentions(test::failure_of([&] { const gt::Workers more(served.program(), {}); }),
                        {"has workers already"});
}

TEST(Failures, HandlesDoNotOutliveTheirWorkers) {
  gt::Tensor old;
  {
    const Served served(1);
    const gt::Workers workers(served.program(), {});
    old = gt::ones({2});
    EXPECT_EQ(old.sum().item(), 2);
  }
  const Served served(1);
  const gt::Workers workers(served.program(), {});
  const gt::Tensor other = gt::full({2}, 5);
  EXPECT_EQ(other.sum().item(), 10);
  test::expect_mentions(test::failure_of([&] { old.item(); }), {"one element"});
  test::expect_mentions(test::failure_of([&] { old.fetch(); }), {"workers that this thread had before"});
  test::expect_mentions(test::failure_of([&] { old + other; }), {"workers that this thread had before"});
}

TEST(Failures, InPlaceOperationsDropNoGradientInSilence) {
  const Served served(1);
  const gt::Workers workers(served.program(), {});
  gt::Tensor p = gt::full({2}, 2);
  p.requires_grad_();
  gt::Tensor q = p * 3.0;
  test::expect_mentions(test::failure_of([&] { q.add_(p); }), {"no gradient passes add_", "x = x + y"});
  {
    const gt::no_grad guard;
    p.add_(gt::ones({2}));
  }
  EXPECT_EQ(p.sum().item(), 6);
  gt::Value value = p.fetch();
  value.floats();
  test::expect_mentions(test::failure_of([&] { value.floats(); }), {"was read before"});
}

/// The session goes on as if the micro-batches had been called for one by one.
TEST(Failures, ACallbackThatThrowsLeavesTheSessionWhole) {
  const std::string path = ::testing::TempDir() + "two-stages.yaml";
  std::ofstream(path) << "stage0: {workers: [0]}\nstage1: {workers: [1]}\n";
  const Served served(2);
  const gt::Workers workers(served.program(), {.signals = path});
  gt::Tensor a = gt::full({2, 2}, 2), b = gt::full({2, 2}, 3);
  a.requires_grad_();
  b.requires_grad_();
  int64_t throws_at = 2;
  const auto loss_of = [&](int64_t micro_batch) {
    gt::Tensor x;
    {
      const gt::signal::context scope("stage0");
      x = gt::matmul(gt::ones({2, 2}), a);
    }
    {
      const gt::signal::context scope("stage0_to_stage1");
      x = gt::here(x);
    }
    const gt::signal::context scope("stage1");
    gt::Tensor loss = gt::matmul(x, b).mean();
    if (micro_batch == throws_at) throw ConfigError("mine");
    if (throws_at == -1) loss.item();
    return loss;
  };
  test::expect_mentions(test::failure_of([&] { gt::schedule("1f1b", 4, loss_of); }), {"mine"});
  EXPECT_EQ(b.sum().item(), 12);
  throws_at = -1;
  test::expect_mentions(test::failure_of([&] { gt::schedule("1f1b", 4, loss_of); }),
                        {"read it after the call"});
  a.zero_grad();
  b.zero_grad();
  throws_at = 9;
  EXPECT_EQ(gt::schedule("1f1b", 4, loss_of).at(3).item(), 24);
  EXPECT_EQ(b.grad().sum().item(), 4 * 2 * 4 / 4.0);
}

/// What throws within a scope leaves the scopes as they were, and too many operands are refused.
TEST(Failures, WhatThrowsWithinAScopeLeavesTheSessionWhole) {
  const std::string path = ::testing::TempDir() + "one-scope.yaml";
  std::ofstream(path) << "both: {workers: [0, 1], replicated: true}\n";
  const Served served(2);
  const gt::Workers workers(served.program(), {.signals = path});
  gt::Tensor p = gt::ones({4});
  p.requires_grad_();
  {
    const gt::signal::context scope("both");
    test::expect_mentions(test::failure_of([&] { (p * 2.0).backward(); }),
                          {"root without a gradient is a scalar"});
    (p * 2.0).sum().backward();
  }
  EXPECT_EQ(p.grad().sum().item(), 8);
  const std::vector<gt::Tensor> seven(7, gt::ones({2}));
  test::expect_mentions(test::failure_of([&] { gt::cat(seven, 0); }), {"7 tensors for cat", "up to 6"});
  EXPECT_EQ(gt::cat({seven.begin(), seven.begin() + 6}, 0).sum().item(), 12);
}

/// As in torch: without a gradient there is no decay and no momentum, either.
TEST(Failures, ParametersThatNothingReachedStay) {
  const Served served(1);
  const gt::Workers workers(served.program(), {});
  gt::Tensor used = gt::full({2}, 2), idle = gt::full({2}, 2);
  used.requires_grad_();
  idle.requires_grad_();
  gt::AdamW optimizer({used, idle}, 0.1, 0.9, 0.999, 1e-8, 0.5);
  (used * idle).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
  const double before = idle.sum().item();
  used.sum().backward();
  EXPECT_FALSE(idle.grad().defined());
  optimizer.step();
  EXPECT_EQ(idle.sum().item(), before);
  EXPECT_LT(before, 4);
}

/// A message is the tensor as it was when it left, whatever the program writes to it afterwards.
TEST(Failures, MessagesKeepWhatWasSent) {
  const std::string path = ::testing::TempDir() + "overlapping.yaml";
  std::ofstream(path)
      << "few: {workers: [0, 1], replicated: true}\nmany: {workers: [0, 1, 2, 3], replicated: true}\n"
         "last: {workers: [3], replicated: true}\n";
  const Served served(4);
  const gt::Workers workers(served.program(), {.signals = path});
  for (int round = 0; round < 20; ++round) {
    gt::Tensor w = gt::full({512, 512}, 1), many, last;
    {
      const gt::signal::context scope("few");
      w = w + w;
    }
    {
      const gt::signal::context scope("many");
      many = gt::here(w);
    }
    {
      const gt::signal::context scope("last");
      last = gt::here(w);
    }
    w.add_(w);
    EXPECT_EQ(last.max().item(), 2);
    EXPECT_EQ(last.min().item(), 2);
    const gt::signal::context scope("many");
    EXPECT_EQ(many.max().item(), 2) << "on the first of its workers, which have w, too";
  }
}

TEST(Failures, LargeValuesGoBothWays) {
  const Served served(2);
  const gt::Workers workers(served.program(), {});
  std::vector<float> values(1 << 20);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const gt::Tensor there = gt::tensor(values, {1024, 1024});
  EXPECT_EQ(there.transpose(0, 1).transpose(0, 1).fetch().floats(), values);
}

}  // namespace
}  // namespace trireme
