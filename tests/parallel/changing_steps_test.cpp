// Steps that are not like the one before: parameters freeze in the middle of one, ranks take other ways
// through the module, calls are refused and training goes on.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/parallel/plain_net.h"
#include "tests/support/engine_on_model.h"
#include "tests/support/refusal.h"
#include "tests/support/spawn.h"
#include "tests/support/tiny_training.h"
#include "trireme/memory/recompute.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;
using parallel::DataParallel;

constexpr const char* kChangingPolicies[] = {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"};
constexpr double kChangingRate = 0.05;
constexpr int64_t kChangingRanks = 2;

at::Tensor loss_of(const Net& net, int64_t step, int64_t rank) {
  const auto part = static_cast<size_t>(rank);
  return loss_sum(net, inputs(step).chunk(kChangingRanks)[part], targets(step).chunk(kChangingRanks)[part]) /
         10.0;
}

void set_trained(const torch::nn::Module& module, bool on) {
  for (auto& param : module.parameters()) param.requires_grad_(on);
}

void forget_gradients(const Net& net) {
  for (auto& param : net.parameters()) param.mutable_grad().reset();
}

void descend(const Net& net, double factor = 1.0) {
  const at::NoGradGuard no_grad;
  for (auto& param : net.parameters()) {
    if (param.grad().defined() && param.requires_grad()) param.sub_(param.grad() * (kChangingRate * factor));
  }
}

TEST(FrozenInTheMiddle, UnitsAreNotInTheNormThatIsClipped) {
  constexpr double kMaxNorm = 0.5;
  const auto change = [](const Net& net, int64_t step) {
    if (step == 1) set_trained(*net.blocks[1], false);
    if (step == 3) set_trained(*net.blocks[1], true);
  };
  Net plain(7);
  std::vector<double> norms;
  for (int64_t step = 0; step < kSteps; ++step) {
    change(plain, step);
    forget_gradients(plain);
    for (int64_t rank = 0; rank < kChangingRanks; ++rank)
      (loss_of(plain, step, rank) / kChangingRanks).backward();
    double squares = 0.0;
    for (const auto& param : plain.parameters()) {
      if (param.grad().defined()) squares += param.grad().square().sum().item<double>();
    }
    norms.push_back(std::sqrt(squares));
    descend(plain, std::min(1.0, kMaxNorm / (norms.back() + 1e-6)));
  }
  const Weights wanted = copies(parameters_of(plain));
  for (const char* policy : kChangingPolicies) {
    run_ranks(kChangingRanks, [&](std::shared_ptr<World> world) {
      Net net(7);
      const auto engine = wrap(net, mesh_of(world), {.policy = policy, .bucket_mib = 0.0005});
      const auto optimizer = optim::build(descent(kChangingRate), engine->optimizer_params());
      for (int64_t step = 0; step < kSteps; ++step) {
        change(net, step);
        engine->backward(loss_of(net, step, world->rank()));
        const double norm = norms[static_cast<size_t>(step)];
        EXPECT_NEAR(engine->clip_grad_norm(kMaxNorm), norm, 1e-5 * norm) << policy << " in step " << step;
        engine->step(*optimizer);
      }
      expect_close(weights_of(*engine), wanted, policy);
    });
  }
}

TEST(FrozenInTheMiddle, OfAMicroBatchOrAStepLeavesNothing) {
  const auto train = [](const Net& net, const auto& forward, const auto& backward, const auto& update) {
    for (int64_t step = 0; step < 3; ++step) {
      if (step == 2) set_trained(*net.blocks[2], true);
      for (int64_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
        if (step == 1 && micro_batch == 1) set_trained(*net.blocks[2], false);
        const at::Tensor loss = forward(2 * step + micro_batch);
        if (step == 0 && micro_batch == 1) net.blocks[0]->w2.requires_grad_(false);
        backward(loss, micro_batch == 1);
      }
      update();
      net.blocks[0]->w2.requires_grad_(true);
    }
  };
  Net plain(7);
  train(
      plain,
      [&](int64_t batch) {
        return (loss_of(plain, batch, 0) + loss_of(plain, batch, 1)) / (2 * kChangingRanks);
      },
      [](const at::Tensor& loss, bool) { loss.backward(); },
      [&] {
        descend(plain);
        forget_gradients(plain);
      });
  const Weights wanted = copies(parameters_of(plain));
  for (const char* policy : kChangingPolicies) {
    run_ranks(kChangingRanks, [&](std::shared_ptr<World> world) {
      Net net(7);
      const auto engine = wrap(net, mesh_of(world), {.policy = policy, .bucket_mib = 0.0005});
      const auto optimizer = optim::build(descent(kChangingRate), engine->optimizer_params());
      train(
          net, [&](int64_t batch) { return loss_of(net, batch, world->rank()); },
          [&](const at::Tensor& loss, bool last) {
            last ? engine->backward(loss) : engine->accumulate(loss);
          },
          [&] { engine->step(*optimizer); });
      expect_close(weights_of(*engine), wanted, policy);
    });
  }
}

TEST(OtherWays, OfRanksThroughWholeParametersAreUpdatedAlike) {
  const auto set_way = [](Net& net, const std::vector<std::shared_ptr<Block>>& blocks, int64_t rank) {
    net.blocks = rank == 0 ? blocks : std::vector{blocks[2], blocks[0]};
  };
  Net plain(7);
  const auto all = plain.blocks;
  for (int64_t step = 0; step < kSteps; ++step) {
    forget_gradients(plain);
    for (int64_t rank = 0; rank < kChangingRanks; ++rank) {
      set_way(plain, all, rank);
      (loss_of(plain, step, rank) / kChangingRanks).backward();
    }
    descend(plain);
  }
  const Weights wanted = copies(parameters_of(plain));
  for (const char* policy : {"ddp", "zero1", "zero2"}) {
    run_ranks(kChangingRanks, [&](std::shared_ptr<World> world) {
      Net net(7);
      const auto engine = parallel::fully_shard(net, mesh_of(world),
                                                {.policy = policy,
                                                 .blocks = {"blocks.0", "blocks.1", "blocks.2", "blocks.3"},
                                                 .unused = parallel::Unused::kZero});
      const auto optimizer = optim::build(descent(kChangingRate), engine->optimizer_params());
      set_way(net, std::vector(net.blocks), world->rank());
      for (int64_t step = 0; step < kSteps; ++step) {
        engine->backward(loss_of(net, step, world->rank()));
        engine->step(*optimizer);
      }
      expect_close(weights_of(*engine), wanted, policy);
    });
  }
}

TEST(Held, MayEndBetweenForwardAndBackward) {
  at::set_num_threads(1);
  const plan::ModelConfig config = tiny_model(plan::ModelFamily::kGpt2);
  const plan::ModelFacts facts = plan::describe(config, 8);
  std::set<std::string> digests;
  std::mutex mutex;
  for (const bool holds : {false, true}) {
    run_ranks(kChangingRanks, [&](std::shared_ptr<World> world) {
      EngineOnModel trained(config, facts, world, {.policy = plan::find_policy("fsdp")}, 11);
      const auto optimizer = optim::adamw(trained.engine.optimizer_params());
      for (int64_t step = 0; step < 2; ++step) {
        const at::Tensor tokens = tiny_tokens(step, 4, config.vocab_size).narrow(0, 2 * world->rank(), 2);
        at::Tensor loss;
        {
          std::optional<DataParallel::Held> held;
          if (holds) held.emplace(trained.engine);
          loss = trained.model->loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
        }
        trained.engine.backward(loss);
        trained.engine.step(*optimizer);
      }
      const std::string digest = parallel::weights_digest(trained.engine);
      const std::lock_guard lock(mutex);
      digests.insert(digest);
    });
  }
  EXPECT_EQ(digests.size(), 1u);
}

/// Runs block 1 twice, each time recomputed by itself.
struct Recomputed : Net {
  using Net::Net;
  at::Tensor forward(at::Tensor x) const override {
    for (const size_t block : {0, 1, 2, 1, 3}) {
      const auto run = [module = blocks[block]](const at::Tensor& in) { return module->forward(in); };
      x = memory::recomputed(x, run, /*draws=*/false);
    }
    return at::matmul(x, head);
  }
};

TEST(RefusedCalls, RecomputingABlockThatRunsTwiceIsRefusedByName) {
  for (const char* policy : kChangingPolicies) {
    run_ranks(kChangingRanks, [&](std::shared_ptr<World> world) {
      Recomputed net(7);
      const auto engine = wrap(net, mesh_of(world), {.policy = policy});
      expect_refusal([&] { engine->backward(loss_of(net, 0, world->rank())); },
                     {"blocks.1", "more than once in one backward pass", "recompute"});
    });
  }
}

TEST(RefusedCalls, OfBackwardDoNotCountInTheMean) {
  Net plain(7);
  for (int64_t step = 0; step < 2; ++step) {
    forget_gradients(plain);
    loss_of(plain, step, 0).backward();
    descend(plain);
  }
  run_ranks(1, [&](std::shared_ptr<World> world) {
    Net net(7);
    const auto engine = wrap(net, mesh_of(world), {.policy = "ddp"});
    const auto optimizer = optim::build(descent(kChangingRate), engine->optimizer_params());
    for (int64_t step = 0; step < 2; ++step) {
      engine->backward(loss_of(net, step, 0));
      expect_refusal([&] { engine->backward(loss_of(net, step, 0)); }, {"was never used"});
      engine->step(*optimizer);
    }
    expect_close(weights_of(*engine), copies(parameters_of(plain)), "after refused calls");
  });
}

TEST(RefusedCalls, AShadowNeedsAWholeStepAndWhereUnitsAreGatheredOneSinceTheyWereFrozen) {
  for (const char* policy : kChangingPolicies) {
    run_ranks(kChangingRanks, [&](std::shared_ptr<World> world) {
      Net net(7);
      const auto engine = wrap(net, mesh_of(world), {.policy = policy});
      const auto optimizer = optim::build(descent(kChangingRate), engine->optimizer_params());
      const auto shadow = [&] { engine->shadow_micro_batch(); };
      engine->accumulate(loss_of(net, 0, world->rank()));
      expect_refusal(shadow, {"has not run a step"});
      engine->backward(loss_of(net, 0, world->rank()));
      engine->step(*optimizer);
      set_trained(*net.blocks[1], false);
      if (plan::find_policy(policy).shard_parameters) {
        expect_refusal(shadow, {"frozen or unfrozen"});
        return;
      }
      world->rank() == 0 ? engine->backward(loss_of(net, 1, 0)) : shadow();
      engine->step(*optimizer);
    });
  }
}

/// Digest of six steps under a hook whose micro-batches weigh `weight(step)`.
template <typename Weight>
std::string digest_under(const parallel::HookOptions& hook, const Weight& weight) {
  std::string digest;
  run_ranks(kChangingRanks, [&](std::shared_ptr<World> world) {
    Net net(7);
    const auto engine = wrap(net, mesh_of(world), {.policy = "zero1", .hook = hook});
    const auto optimizer = optim::build(descent(kChangingRate), engine->optimizer_params());
    for (int64_t step = 0; step < 6; ++step) {
      engine->backward(loss_of(net, step, world->rank()), weight(step));
      engine->step(*optimizer);
    }
    const std::string found = parallel::weights_digest(*engine);
    if (world->rank() == 0) digest = found;
  });
  return digest;
}

/// Powers of two, which round nothing.
TEST(ChangingWeights, OfStepsChangeNothingUnderAHook) {
  using parallel::Hook;
  for (const Hook hook : {Hook::kFp16, Hook::kInt8, Hook::kTopK, Hook::kPowerSgd}) {
    const parallel::HookOptions options{.hook = hook, .rank = 1, .density = 0.05, .start_step = 1};
    const std::string wanted = digest_under(options, [](int64_t) { return 1.0; });
    EXPECT_EQ(digest_under(options, [](int64_t step) { return std::ldexp(1.0, step % 2 == 0 ? 20 : -3); }),
              wanted)
        << static_cast<int>(hook);
  }
}

TEST(ChangingWeights, OfALossInFewBitsCountAsTheyAreRounded) {
  for (const int64_t ranks : {1, 3}) {
    run_ranks(ranks, [&](std::shared_ptr<World> world) {
      Net net(7);
      const auto engine =
          wrap(net, mesh_of(world), {.policy = "ddp", .compute = at::kBFloat16, .reduce = at::kBFloat16});
      const auto norm = [&](double weight) {
        const at::Tensor x = inputs(0).to(at::kBFloat16), y = targets(0).to(at::kBFloat16);
        engine->backward(loss_sum(net, x, y), weight);
        const double found = engine->grad_norm();
        engine->skip_step();
        return found;
      };
      const double wanted = norm(3.0);
      EXPECT_NEAR(norm(769.0), wanted, 1e-6 * wanted) << "768 in bf16";
      Net other(7);
      const auto of_other = wrap(other, mesh_of(world), {.policy = "ddp"});
      const at::Tensor loss = (loss_sum(other, inputs(0), targets(0)) / 100.0).to(at::kHalf);
      expect_refusal([&] { of_other->backward(loss, 1e6); },
                     {"weight 1000000", "Half", "multiply all weights by one number"});
    });
  }
}

/// Rank 0's gradient explodes, whichever parameter it is of and whoever would have summed it.
TEST(LocalSgd, ClipsByANormThatCoversAllOfEveryRanksGradient) {
  run_ranks(kChangingRanks, [&](std::shared_ptr<World> world) {
    Net net(7);
    const parallel::HookOptions hook{.hook = parallel::Hook::kLocalSgd, .local_steps = 2};
    const auto engine =
        wrap(net, mesh_of(world), {.policy = "ddp", .unused = parallel::Unused::kZero, .hook = hook});
    const auto optimizer = optim::build(descent(1.0), engine->optimizer_params());
    for (const at::Tensor& param : {net.blocks[0]->w1, net.blocks[3]->w2, net.head}) {
      const at::Tensor before = param.detach().clone();
      const double slope = world->rank() == 0 ? 1e6 : 1e-3;
      engine->backward((param * slope).sum());
      const double wanted = 1e6 * std::sqrt(static_cast<double>(param.numel()) / kChangingRanks);
      EXPECT_NEAR(engine->clip_grad_norm(1.0), wanted, 1e-5 * wanted);
      engine->step(*optimizer);
      engine->average_parameters();
      EXPECT_LT((param.detach() - before).norm().item<double>(), 1.0 + 1e-4);
      engine->backward((param * (world->rank() == 0 ? std::nan("") : 1.0)).sum());
      EXPECT_TRUE(std::isnan(engine->grad_norm())) << "on all ranks";
      engine->skip_step();
    }
  });
}

}  // namespace
}  // namespace trireme
