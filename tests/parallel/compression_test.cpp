// Hooks against the exact sum, against what they owe, and against training without any.
#include "trireme/parallel/compression.h"
#include "tests/support/relative_error.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/tiny_training.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using parallel::Hook;
using parallel::HookOptions;
using test::TinyRun;
using test::train_tiny;

constexpr int64_t kRanks = 3;

plan::FlatLayout layout() {
  return plan::FlatLayout({{"wide", {40, 60}}, {"bias", {60}}, {"deep", {30, 20, 3}}, {"thin", {50, 2}}},
                          kRanks);
}

at::Tensor gradient(int64_t rank, int64_t step, int64_t count) {
  at::Tensor values = at::empty({count});
  auto* const out = values.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = mix64(static_cast<uint64_t>(rank * 100 + step), static_cast<uint64_t>(i));
    out[i] = static_cast<float>(bits >> 40) / 16777216.0f - 0.5f;
  }
  return values;
}

at::Tensor exact_sum(int64_t step, int64_t count) {
  at::Tensor sum = at::zeros({count}, at::kDouble);
  for (int64_t rank = 0; rank < kRanks; ++rank) sum += gradient(rank, step, count).to(at::kDouble);
  return sum;
}

/// The hook's sums of `steps` steps (as all ranks' shards together), and what all ranks owe after the last.
struct Result {
  std::vector<at::Tensor> sums;
  at::Tensor owed;
  int64_t bytes = 0;  ///< sent by rank 0
};

Result run_hook(const HookOptions& options, int64_t steps, bool peer_memory = true,
                int64_t commits_every = 1) {
  const plan::FlatLayout flat = layout();
  Result result;
  const auto body = [&](std::shared_ptr<comm::World> world) {
    const auto group = world->make_group("all", {0, 1, 2});
    const auto compressor = parallel::make_compressor(options, flat);
    for (int64_t step = 0; step < steps; ++step) {
      at::Tensor shard = at::empty({flat.shard_numel()}), whole = at::empty({flat.numel()});
      compressor->reduce(*group, shard, gradient(world->rank(), step, flat.numel()));
      if ((step + 1) % commits_every == 0) compressor->commit();
      if (world->rank() == 0 && step == 0) {
        for (const auto& [kind, traffic] : group->traffic()) result.bytes += traffic.bytes;
      }
      group->all_gather(whole, shard);
      if (world->rank() == 0) result.sums.push_back(whole.clone());
    }
    at::Tensor owed = compressor->error().defined() ? compressor->error().clone() : at::zeros({flat.numel()});
    group->all_reduce(owed, comm::ReduceOp::kSum);
    if (world->rank() == 0) result.owed = owed;
  };
  test::run_ranks(kRanks, body, 20.0, 90.0, peer_memory);
  return result;
}

TEST(Compression, NothingIsLostBetweenWhatWasSentAndWhatIsOwed) {
  constexpr int64_t kSteps = 4;
  const int64_t count = layout().numel();
  at::Tensor wanted = at::zeros({count}, at::kDouble);
  for (int64_t step = 0; step < kSteps; ++step) wanted += exact_sum(step, count);
  for (const Hook hook : {Hook::kInt8, Hook::kTopK, Hook::kPowerSgd}) {
    for (const int64_t reductions : {1, 2}) {  // in a step
      const Result result =
          run_hook({.hook = hook, .rank = 2, .density = 0.05, .start_step = 0}, kSteps, true, reductions);
      at::Tensor total = result.owed.to(at::kDouble);
      for (const at::Tensor& sum : result.sums) total = total + sum;
      EXPECT_LT(test::relative_error(total, wanted), 1e-5) << static_cast<int>(hook);
      EXPECT_GT(result.owed.abs().max().item<double>(), 0.0) << "it was lossy: " << static_cast<int>(hook);
    }
  }
}

/// The hook's sum of a step on this rank: its shard.
class Stepper {
 public:
  Stepper(const HookOptions& options, const plan::FlatLayout& flat, comm::Group& group)
      : flat_(flat), group_(group), compressor_(parallel::make_compressor(options, flat)) {}

  /// The shard of the sum of all ranks' gradients, whose padding is zero as an engine's is.
  at::Tensor reduce(int64_t step) {
    at::Tensor grad = at::zeros({flat_.numel()}), shard = at::empty({flat_.shard_numel()});
    const at::Tensor values = gradient(group_.rank(), step, flat_.numel());
    for (const plan::FlatEntry& entry : flat_.entries())
      grad.narrow(0, entry.offset, entry.numel).copy_(values.narrow(0, entry.offset, entry.numel));
    compressor_->reduce(group_, shard, grad);
    return shard;
  }
  at::Tensor take(int64_t step) {
    at::Tensor shard = reduce(step);
    compressor_->commit();
    return shard;
  }
  parallel::Compressor& compressor() { return *compressor_; }

 private:
  const plan::FlatLayout& flat_;
  comm::Group& group_;
  std::unique_ptr<parallel::Compressor> compressor_;
};

/// Calls body(stepper, stepper) on every rank of a group, for each hook that remembers something.
void with_two_steppers(const std::function<void(Stepper&, Stepper&, const std::string&)>& body) {
  const plan::FlatLayout flat = layout();
  for (const Hook hook : {Hook::kInt8, Hook::kTopK, Hook::kPowerSgd}) {
    test::run_ranks(kRanks, [&](std::shared_ptr<comm::World> world) {
      const auto group = world->make_group("all", {0, 1, 2});
      const HookOptions options{.hook = hook, .rank = 2, .density = 0.05, .start_step = 2};
      Stepper one(options, flat, *group), other(options, flat, *group);
      body(one, other, fmt::format("{}", hook));
    });
  }
}

/// A resumed run has the sums of one that was never interrupted, before and after late hooks have begun.
TEST(Compression, WhoeverGetsAStateGoesOnAsItsGiver) {
  const plan::FlatLayout flat = layout();
  for (const int64_t given_at : {1, 2, 4}) {
    with_two_steppers([&](Stepper& giver, Stepper& taker, const std::string& what) {
      for (int64_t step = 0; step < given_at; ++step) giver.take(step);
      for (int64_t step = 10; step < 14; ++step) taker.take(step);  // a past of its own, which ends here
      taker.reduce(14);
      std::vector<parallel::HookState> states;
      for (const plan::FlatEntry& entry : flat.entries()) {
        parallel::HookState& state = states.emplace_back(giver.compressor().state(entry));
        if (state.owed.defined()) state.owed = state.owed.clone();
        if (state.factor.defined()) state.factor = state.factor.clone();
      }
      taker.compressor().set_state(states);
      for (int64_t step = given_at; step < given_at + 4; ++step)
        EXPECT_TRUE(at::equal(taker.take(step), giver.take(step))) << what << ", step " << step;
    });
  }
}

TEST(Compression, AGradientThatIsNotAppliedLeavesNoTrace) {
  with_two_steppers([&](Stepper& plain, Stepper& discards, const std::string& what) {
    for (int64_t step = 0; step < 6; ++step) {
      discards.reduce(20 + step);
      discards.compressor().discard();
      EXPECT_TRUE(at::equal(discards.take(step), plain.take(step))) << what << ", step " << step;
    }
  });
}

TEST(Compression, ErrorsStayWithinTheirBounds) {
  const int64_t count = layout().numel();
  const at::Tensor wanted = exact_sum(0, count);
  EXPECT_LT(test::relative_error(run_hook({.hook = Hook::kFp16}, 1).sums[0], wanted),
            5e-4);  // half an ulp of 11 bits
  const at::Tensor int8 = run_hook({.hook = Hook::kInt8}, 1).sums[0];
  // Half a step of amax / 127 per rank, with amax at most 0.5.
  EXPECT_LT((int8.to(at::kDouble) - wanted).abs().max().item<double>(), kRanks * 0.5 * 0.5 / 127.0 * 1.001);
}

TEST(Compression, WithNothingLeftOutTheSumIsExact) {
  const at::Tensor wanted = exact_sum(0, layout().numel());
  EXPECT_LT(test::relative_error(run_hook({.hook = Hook::kTopK, .density = 1.0, .start_step = 0}, 1).sums[0],
                                 wanted),
            1e-6);
  const Result late = run_hook({.hook = Hook::kPowerSgd, .rank = 1, .start_step = 1}, 1);
  EXPECT_LT(test::relative_error(late.sums[0], wanted), 1e-6) << "before start_step";
}

TEST(Compression, PowerSgdFindsASumOfLowRankExactly) {
  const plan::FlatLayout flat({{"w", {30, 40}}}, kRanks);
  test::run_ranks(kRanks, [&](std::shared_ptr<comm::World> world) {
    const auto group = world->make_group("all", {0, 1, 2});
    const auto compressor =
        parallel::make_compressor({.hook = Hook::kPowerSgd, .rank = 3, .start_step = 0}, flat);
    // One rank-1 matrix each: the sum has rank 3.
    const auto outer = [](int64_t rank) {
      return at::outer(gradient(rank, 1, 30), gradient(rank, 2, 40)).view({-1});
    };
    at::Tensor shard = at::empty({flat.shard_numel()}), whole = at::empty({flat.numel()});
    compressor->reduce(*group, shard, outer(world->rank()));
    group->all_gather(whole, shard);
    EXPECT_LT(test::relative_error(whole, (outer(0) + outer(1) + outer(2)).to(at::kDouble)), 1e-5);
  });
}

TEST(Compression, FewerBytesTravel) {
  const int64_t count = layout().numel();
  const int64_t plain = 2 * 4 * count / kRanks;  // an fp32 reduce-scatter
  EXPECT_EQ(run_hook({.hook = Hook::kFp16}, 1).bytes, plain / 2);
  EXPECT_LT(run_hook({.hook = Hook::kInt8}, 1).bytes, plain * 0.3);
  EXPECT_LT(run_hook({.hook = Hook::kTopK, .density = 0.01, .start_step = 0}, 1).bytes, plain * 0.1);
  // PowerSGD: an all-reduce of both factors of the two matrices that shrink, and of all the rest.
  const int64_t lefts = 2 * (40 + 30), rights = 2 * (60 + 60), rest = count - 40 * 60 - 30 * 60;
  const auto all_reduce = [](int64_t elements) {
    return plan::wire_bytes(plan::Collective::kAllReduce, 4 * elements, kRanks);
  };
  EXPECT_EQ(run_hook({.hook = Hook::kPowerSgd, .rank = 2, .start_step = 0}, 1, /*peer_memory=*/false).bytes,
            all_reduce(lefts) + all_reduce(rights + rest));
}

TEST(Compression, PowerSgdNeverSendsMoreThanNoHook) {
  for (const std::vector<plan::ParamSpec>& params : {std::vector<plan::ParamSpec>{{"thin", {50, 2}}},
                                                     {{"w", {16, 16}}, {"bias", {4000}}},
                                                     {{"w", {9, 9}}},
                                                     {{"w", {40, 60}}, {"v", {64, 64}}, {"bias", {60}}},
                                                     {{"bias", {7}}}}) {
    const plan::FlatLayout flat(params, kRanks);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      test::run_ranks(kRanks, [&](std::shared_ptr<comm::World> world) {
        const auto sent = [&](Hook hook) {
          const auto group = world->make_group(hook == Hook::kNone ? "plain" : "hook", {0, 1, 2});
          const auto compressor = parallel::make_compressor({.hook = hook, .rank = 4, .start_step = 0}, flat);
          const at::Tensor grad = gradient(world->rank(), 0, flat.numel()).to(dtype);
          at::Tensor shard = at::empty({flat.shard_numel()});
          compressor ? compressor->reduce(*group, shard, grad) : group->reduce_scatter_ordered(shard, grad);
          int64_t bytes = 0;
          for (const auto& [kind, traffic] : group->traffic()) bytes += traffic.bytes;
          return bytes;
        };
        EXPECT_LE(sent(Hook::kPowerSgd), sent(Hook::kNone)) << params.front().name << ' ' << dtype;
      });
    }
  }
}

TEST(Compression, TrainingConvergesAsWithoutAHook) {
  const TinyRun base{.policy = "ddp", .ranks = 2, .steps = 60};
  const double plain = train_tiny(base).losses.back();
  const auto loss = [&](const HookOptions& hook) {
    TinyRun run = base;
    run.hook = hook;
    return train_tiny(run).losses.back();
  };
  EXPECT_NEAR(loss({.hook = Hook::kFp16}), plain, 0x1p-11 * plain);
  EXPECT_NEAR(loss({.hook = Hook::kInt8}), plain, 0.01 * plain);
  EXPECT_NEAR(loss({.hook = Hook::kTopK, .density = 0.25, .start_step = 5}), plain, 0.02 * plain);
  EXPECT_NEAR(loss({.hook = Hook::kPowerSgd, .rank = 4, .start_step = 5}), plain, 0.06 * plain);
  EXPECT_NEAR(loss({.hook = Hook::kLocalSgd, .local_steps = 4}), plain, 0.06 * plain);
}

TEST(Compression, EveryPolicyGivesTheSameBitsUnderOneHook) {
  for (const Hook hook : {Hook::kFp16, Hook::kInt8, Hook::kTopK, Hook::kPowerSgd}) {
    TinyRun run{.policy = "ddp", .ranks = 3, .steps = 8};
    run.hook = {.hook = hook, .rank = 2, .density = 0.1, .start_step = 2};
    const std::string reference = train_tiny(run).digest;
    for (const char* policy : {"zero1", "zero2", "zero3", "fsdp:shard_grad_op"}) {
      run.policy = policy;
      EXPECT_EQ(train_tiny(run).digest, reference) << policy << ", hook " << static_cast<int>(hook);
    }
  }
}

TEST(Compression, LocalSgdSendsParametersAndNoGradients) {
  TinyRun run{.policy = "ddp", .ranks = 2, .steps = 10};
  run.hook = {.hook = Hook::kLocalSgd, .local_steps = 4};
  const auto outcome = train_tiny(run);
  int64_t numel = 0;
  for (const plan::FlatLayout& flat : outcome.layouts) numel += flat.numel();
  // Two averages on the way and one at the end, each a reduce-scatter of fp32.
  EXPECT_EQ(outcome.traffic.at(plan::Collective::kAllToAll).bytes, 3 * 4 * numel / 2);
}

TEST(Compression, RefusesPoliciesThatItCannotServe) {
  const auto refused = [](TinyRun run) { EXPECT_THROW(train_tiny(run), ConfigError) << run.policy; };
  TinyRun run{.policy = "zero1", .ranks = 2, .steps = 1};
  run.hook.hook = Hook::kLocalSgd;
  refused(run);
  run = {.policy = "fsdp:hybrid_shard", .ranks = 4, .steps = 1};
  run.replicas = 2;
  run.hook.hook = Hook::kInt8;
  refused(run);
}

}  // namespace
}  // namespace trireme
