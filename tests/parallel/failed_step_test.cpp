// Steps that fail in the middle: nothing of them is left in the next.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <stdexcept>

#include "tests/parallel/plain_net.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;

/// Identity whose backward throws while `armed`, as an allocation that fails does.
struct Trap : torch::autograd::Function<Trap> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    if (armed) throw std::runtime_error("out of memory");
    return grads;
  }
  static thread_local bool armed;
};
thread_local bool Trap::armed = false;

/// A trap before block `at`: backward has been through the blocks after it when it throws.
struct TrappedNet : Net {
  TrappedNet(uint64_t seed, size_t at) : Net(seed), at_(at) {}
  at::Tensor forward(at::Tensor x) const override {
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (i == at_) x = Trap::apply(x);
      x = blocks[i]->forward(x);
    }
    return at::matmul(x, head);
  }
  size_t at_;
};

constexpr const char* kFailingPolicies[] = {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"};

/// Trains with two micro-batches a step; before each step `fail` may spoil one.
template <typename Fail>
void expect_unspoiled(const Fail& fail, int64_t ranks, const char* policy, size_t at) {
  Net plain(7);
  const Weights wanted = reference(plain);
  run_ranks(ranks, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    TrappedNet net(7, at);
    const auto engine = wrap(net, mesh, {.policy = policy, .bucket_mib = 0.0005});
    const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
    const auto rank = static_cast<size_t>(mesh.dp_rank);
    for (int64_t step = 0; step < kSteps; ++step) {
      const auto x = inputs(step).chunk(ranks)[rank].chunk(2), y = targets(step).chunk(ranks)[rank].chunk(2);
      const auto pass = [&](size_t half, bool last) {
        const auto rows = static_cast<double>(x[half].size(0));
        const at::Tensor loss = loss_sum(net, x[half], y[half]) / rows;
        last ? engine->backward(loss, rows) : engine->accumulate(loss, rows);
      };
      fail(*engine, net, pass);
      pass(0, false);
      pass(1, true);
      engine->step(*optimizer);
    }
    expect_close(weights_of(*engine), wanted, fmt::format("{} on {}, trap {}", policy, ranks, at));
  });
}

TEST(FailedStep, LeavesNothingWhereverBackwardThrows) {
  at::set_num_threads(1);
  for (const char* policy : kFailingPolicies) {
    for (const size_t at : {size_t{1}, size_t{3}}) {
      for (const bool last : {false, true}) {
        const auto fail = [&](parallel::DataParallel& engine, const Net&, const auto& pass) {
          if (last) pass(0, false);
          Trap::armed = true;
          EXPECT_THROW(pass(last ? 1 : 0, last), std::runtime_error);
          Trap::armed = false;
          const auto optimizer = optim::build(descent(1.0), engine.optimizer_params());
          EXPECT_THROW(engine.step(*optimizer), LogicError) << "there is nothing to apply";
        };
        expect_unspoiled(fail, 2, policy, at);
      }
    }
  }
}

TEST(FailedStep, LeavesNothingWhenAParameterTookNoPart) {
  for (const char* policy : kFailingPolicies) {
    const auto fail = [](parallel::DataParallel&, Net& net, const auto& pass) {
      const auto block = net.blocks[2];
      net.blocks.erase(net.blocks.begin() + 2);
      EXPECT_THROW(pass(0, true), LogicError);
      net.blocks.insert(net.blocks.begin() + 2, block);
    };
    expect_unspoiled(fail, 2, policy, 99);
  }
}

TEST(FailedStep, LeavesNothingOfABackwardPassOutsideTheEngine) {
  for (const char* policy : kFailingPolicies) {
    const auto fail = [](parallel::DataParallel&, const Net& net, const auto& pass) {
      pass(0, false);
      EXPECT_THROW(loss_sum(net, inputs(0), targets(0)).backward(), LogicError);
    };
    expect_unspoiled(fail, 1, policy, 99);
  }
}

TEST(FailedStep, IsForgottenByTheCallerAsWell) {
  for (const char* policy : kFailingPolicies) {
    const auto fail = [](parallel::DataParallel& engine, const Net& net, const auto& pass) {
      pass(0, false);
      pass(1, true);
      engine.skip_step();
      net.forward(inputs(0).narrow(0, 0, 2));  // a forward pass without its backward
      engine.skip_step();
    };
    expect_unspoiled(fail, 2, policy, 99);
  }
}

TEST(FailedStep, AStepNeedsACompleteGradient) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    for (const char* policy : kFailingPolicies) {
      Net net(7);
      const comm::Mesh mesh = mesh_of(world);
      const auto engine = wrap(net, mesh, {.policy = policy});
      const auto optimizer = optim::build(descent(0.01), engine->optimizer_params());
      EXPECT_THROW(engine->step(*optimizer), LogicError) << "before the first";
      engine->accumulate(loss_sum(net, inputs(0), targets(0)));
      EXPECT_THROW(engine->step(*optimizer), LogicError) << "before the last micro-batch";
      engine->backward(loss_sum(net, inputs(0), targets(0)));
      engine->step(*optimizer);
      EXPECT_THROW(engine->step(*optimizer), LogicError) << "twice";
    }
  });
}

TEST(FailedStep, LeavesNothingInWhatAHookRemembers) {
  using parallel::Hook;
  for (const Hook hook : {Hook::kInt8, Hook::kTopK, Hook::kPowerSgd}) {
    std::string wanted;
    for (const int64_t failures : {0, 5}) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        TrappedNet net(7, 1);
        const auto engine = wrap(net, mesh,
                                 {.policy = "ddp",
                                  .bucket_mib = 0.0005,
                                  .hook = {.hook = hook, .rank = 1, .density = 0.05, .start_step = 2}});
        const auto optimizer = optim::build(descent(0.01), engine->optimizer_params());
        for (int64_t step = 0; step < kSteps; ++step) {
          const auto loss = [&] {
            const auto rank = static_cast<size_t>(mesh.dp_rank);
            return loss_sum(net, inputs(step).chunk(2)[rank], targets(step).chunk(2)[rank]);
          };
          for (int64_t i = 0; i < failures; ++i) {
            Trap::armed = i % 2 == 0;
            if (Trap::armed) {
              EXPECT_THROW(engine->backward(loss()), std::runtime_error);
            } else {
              engine->backward(loss() * std::nan(""));
              engine->skip_step();
            }
            Trap::armed = false;
          }
          engine->backward(loss());
          EXPECT_TRUE(std::isfinite(engine->grad_norm()));
          engine->step(*optimizer);
        }
        const std::string digest = parallel::weights_digest(*engine);
        if (world->rank() != 0) return;
        if (failures == 0) wanted = digest;
        EXPECT_EQ(digest, wanted) << static_cast<int>(hook);
      });
    }
  }
}

}  // namespace
}  // namespace trireme
