// Training states of torch's own optimizers in and out.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/parallel/layouts.h"
#include "tests/parallel/normed_net.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/state/state_file.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;

using Make = std::unique_ptr<torch::optim::Optimizer> (*)(std::vector<at::Tensor> tensors);

constexpr std::pair<const char*, Make> kTorchOptimizers[] = {
    {"AdamW",
     [](std::vector<at::Tensor> tensors) -> std::unique_ptr<torch::optim::Optimizer> {
       return std::make_unique<torch::optim::AdamW>(std::move(tensors), torch::optim::AdamWOptions(0.01));
     }},
    {"Adam with amsgrad",
     [](std::vector<at::Tensor> tensors) -> std::unique_ptr<torch::optim::Optimizer> {
       return std::make_unique<torch::optim::Adam>(std::move(tensors),
                                                   torch::optim::AdamOptions(0.01).amsgrad(true));
     }},
    {"SGD",
     [](std::vector<at::Tensor> tensors) -> std::unique_ptr<torch::optim::Optimizer> {
       return std::make_unique<torch::optim::SGD>(
           std::move(tensors), torch::optim::SGDOptions(0.01).momentum(0.9).nesterov(true));
     }},
    {"RMSprop",
     [](std::vector<at::Tensor> tensors) -> std::unique_ptr<torch::optim::Optimizer> {
       return std::make_unique<torch::optim::RMSprop>(
           std::move(tensors), torch::optim::RMSpropOptions(0.001).momentum(0.9).centered(true));
     }},
    {"Adagrad", [](std::vector<at::Tensor> tensors) -> std::unique_ptr<torch::optim::Optimizer> {
       return std::make_unique<torch::optim::Adagrad>(std::move(tensors), torch::optim::AdagradOptions(0.01));
     }}};

TEST(State, OfTorchOptimizersGoesOnUnderAnyPolicyWithTheSameBits) {
  at::set_num_threads(1);
  for (const auto& [name, make] : kTorchOptimizers) {
    for (const int64_t ranks : {1, 2, 3}) {
      const std::string path = scratch(fmt::format("torch-{}.safetensors", ranks));
      for (const Layout& from : {Layout{ranks == 2 ? "ddp" : "fsdp"}}) {
        Weights wanted;
        run_ranks(ranks, [&](std::shared_ptr<World> world) {
          NormedNet net(7);
          const auto engine = wrap_as(net, mesh_of(world, from), from);
          const auto optimizer = make(engine->optimizer_tensors());
          train_steps(net, *engine, *optimizer, 0, 3);
          state::save_state(*engine, *optimizer, path);
          train_steps(net, *engine, *optimizer, 3, kSteps);
          const Weights weights = weights_of(*engine);
          if (world->rank() == 0) wanted = weights;
        });
        for (const Layout& to : layouts(ranks)) {
          run_ranks(ranks, [&](std::shared_ptr<World> world) {
            NormedNet net(99);
            const auto engine = wrap_as(net, mesh_of(world, to), to);
            const auto optimizer = make(engine->optimizer_tensors());
            train_steps(net, *engine, *optimizer, 0, 1);
            state::load_state(*engine, *optimizer, path);
            train_steps(net, *engine, *optimizer, 3, kSteps);
            expect_equal(weights_of(*engine), wanted,
                         fmt::format("{}: {} to {}", name, from.label(ranks), to.label(ranks)));
          });
        }
      }
    }
  }
}

TEST(State, OfTorchAdamWIsThatOfOurs) {
  const std::string path = scratch("adamw.safetensors");
  run_ranks(2, [&](std::shared_ptr<World> world) {
    NormedNet net(7), same(99);
    const auto engine = wrap_as(net, mesh_of(world), Layout{"fsdp"}),
               other = wrap_as(same, mesh_of(world), Layout{"zero2"});
    const auto theirs = kTorchOptimizers[0].second(engine->optimizer_tensors());
    train_steps(net, *engine, *theirs, 0, 3);
    state::save_state(*engine, *theirs, path);
    const auto ours = optim::adamw(other->optimizer_params(), {.lr = 0.01});
    state::load_state(*other, *ours, path);
    EXPECT_EQ(ours->steps(), 3);
    train_steps(net, *engine, *theirs, 3, kSteps);
    train_steps(same, *other, *ours, 3, kSteps);
    expect_close(weights_of(*other), weights_of(*engine), "ours after theirs");
  });
}

TEST(State, OfOptimizersThatAreNotKnownIsRefusedByName) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    const std::string path = scratch("unknown.safetensors");
    NormedNet net(7);
    const auto engine = wrap_as(net, mesh_of(world), Layout{"ddp"});
    torch::optim::LBFGS unknown(engine->optimizer_tensors());
    expect_thrown<LogicError>([&] { state::save_state(*engine, unknown, path); }, {"LBFGS", "AdamW"});
    torch::optim::AdamW strange(net.parameters());
    expect_thrown<LogicError>([&] { state::save_state(*engine, strange, path); }, {"optimizer_tensors()"});
  });
}

}  // namespace
}  // namespace trireme
