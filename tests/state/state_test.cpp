// Training states in and out: what one layout has saved, every other one loads, and training goes on as if it
// had not ended.
#include "trireme/state/state.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/parallel/layouts.h"
#include "tests/parallel/normed_net.h"
#include "tests/support/refusal.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/state/state_file.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;
using state::On;

TEST(State, ShardedPiecesCoverEveryTensorOfTheFullOne) {
  on_layouts_of({1, 2, 3}, [](const Layout& layout, std::shared_ptr<World> world, const std::string& what) {
    const comm::Mesh mesh = mesh_of(world, layout);
    NormedNet net(7);
    const auto engine = wrap_as(net, mesh, layout);
    const auto optimizer = optim::build(adamw(), engine->optimizer_params());
    train_steps(net, *engine, *optimizer, 0, 1);
    const auto whole = state::full_state(*engine, *optimizer);
    EXPECT_EQ(whole.size(), static_cast<size_t>(4 * kParams + kBuffers)) << what;
    EXPECT_EQ(state::full_state(*engine).size(), static_cast<size_t>(kParams + kBuffers)) << what;
    EXPECT_EQ(state::full_state(*engine, On::kRankZero).empty(), world->rank() != 0) << what;
    EXPECT_EQ(whole.at("optimizer.step.head").item<int64_t>(), 1) << what;
    std::map<std::string, int64_t> covered;
    for (const state::StatePiece& piece : state::sharded_state(*engine, *optimizer)) {
      ASSERT_TRUE(whole.contains(piece.name)) << what << ": " << piece.name;
      const at::Tensor& tensor = whole.at(piece.name);
      EXPECT_EQ(tensor.sizes(), at::IntArrayRef(piece.shape)) << what << ": " << piece.name;
      const bool drifts = piece.name.starts_with("norm.running");
      EXPECT_TRUE(drifts || at::equal(piece.values, tensor.reshape({-1}).narrow(0, piece.region.range.begin,
                                                                                piece.region.numel())))
          << what << ": " << piece.name;
      covered[piece.name] += piece.region.numel();
    }
    std::vector<double> mine;
    for (const auto& [name, tensor] : whole) mine.push_back(static_cast<double>(covered[name]));
    std::vector<double> sum(mine.size());
    for (const auto& rank : comm::gather_scalars(*mesh.dp, mine)) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += rank[i];
    }
    size_t next = 0;
    for (const auto& [name, tensor] : whole)
      EXPECT_GE(sum[next++], static_cast<double>(tensor.numel())) << name;
  });
}

/// Trains on for the rest of the steps what `path` holds.
Weights resumed(const Layout& layout, const std::shared_ptr<World>& world, const plan::OptimConfig& config,
                const std::string& path) {
  const comm::Mesh mesh = mesh_of(world, layout);
  NormedNet net(99);
  const auto engine = wrap_as(net, mesh, layout);
  const auto optimizer = optim::build(config, engine->optimizer_params());
  train_steps(net, *engine, *optimizer, 0, 1);  // a state of its own, which shall be gone
  EXPECT_EQ(state::load_state(*engine, *optimizer, path), (state::Notes{{"step", "3"}}));
  EXPECT_EQ(optimizer->steps(), 3);
  train_steps(net, *engine, *optimizer, 3, kSteps);
  return weights_of(*engine);
}

TEST(State, SavedByOnePolicyGoesOnUnderAnyOtherWithTheSameBits) {
  at::set_num_threads(1);
  for (const plan::OptimConfig& config : {adamw(), momentum()}) {
    for (const int64_t ranks : {1, 2, 3}) {
      const std::string path = scratch(fmt::format("state-{}.safetensors", ranks));
      Weights wanted;
      for (const Layout& from : {Layout{"ddp", true}, Layout{"zero2"}, Layout{"fsdp"}}) {
        run_ranks(ranks, [&](std::shared_ptr<World> world) {
          const comm::Mesh mesh = mesh_of(world, from);
          NormedNet net(7);
          const auto engine = wrap_as(net, mesh, from);
          const auto optimizer = optim::build(config, engine->optimizer_params());
          train_steps(net, *engine, *optimizer, 0, 3);
          state::save_state(*engine, *optimizer, path, {{"step", "3"}});
          train_steps(net, *engine, *optimizer, 3, kSteps);
          const Weights weights = weights_of(*engine);
          if (world->rank() == 0) wanted = weights;
        });
        for (const Layout& to : layouts(ranks)) {
          run_ranks(ranks, [&](std::shared_ptr<World> world) {
            expect_equal(resumed(to, world, config, path), wanted,
                         from.label(ranks) + " to " + to.label(ranks));
          });
        }
      }
      for (const int64_t others : {1, 2, 3}) {
        for (const Layout& to : {Layout{"zero2"}, Layout{"fsdp"}}) {
          run_ranks(others, [&](std::shared_ptr<World> world) {
            expect_close(resumed(to, world, config, path), wanted, to.label(others));
          });
        }
      }
    }
  }
}

TEST(State, OfAnotherOptimizerOrNoneIsRefused) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const std::string path = scratch("other-optimizer.safetensors");
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = wrap_as(net, mesh, Layout{"fsdp"});
    const auto first = optim::build(momentum(), engine->optimizer_params());
    train_steps(net, *engine, *first, 0, 1);
    state::save_state(*engine, *first, path);
    const auto second = optim::build(adamw(), engine->optimizer_params());
    expect_thrown<DataError>([&] { state::load_state(*engine, *second, path); },
                             {"optimizer.exp_avg.", "missing", "optimizer.momentum_buffer.", "unexpected"});
    state::load_weights(*engine, path);
    state::save_weights(*engine, path);
    expect_thrown<DataError>([&] { state::load_state(*engine, *first, path); }, {"no optimizer state"});
  });
}

TEST(State, OfAnotherEnginesOptimizerIsNeverUpdated) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7), second(8);
    auto engine = wrap_as(net, mesh, Layout{"ddp"});
    const auto other = wrap_as(second, mesh, Layout{"ddp"});
    const auto theirs = optim::build(adamw(), other->optimizer_params());
    const auto old = optim::build(adamw(), engine->optimizer_params());
    const Weights weights = weights_of(*other);
    const auto refuses = [&](optim::Optimizer& optimizer) {
      engine->backward(loss_sum(net, inputs(0), targets(0)));
      expect_refusal([&] { engine->step(optimizer); }, {"another engine", "optimizer_params()"});
      engine->skip_step();
      expect_refusal([&] { engine->swap_averages(optimizer); }, {"another engine"});
      expect_refusal([&] { state::save_state(*engine, optimizer, scratch("theirs.safetensors")); },
                     {"another engine"});
    };
    refuses(*theirs);
    expect_equal(weights_of(*other), weights, "the other engine's");
    engine.reset();
    engine = parallel::data_parallel(net, mesh, {.policy = "zero1", .bucket_mib = 0.0005});
    refuses(*old);
  });
}

TEST(State, OfParametersThatAreFrozenIsSavedAndLoaded) {
  plan::OptimConfig config = adamw();
  config.ema = 0.9;
  for (const char* policy : {"ddp", "fsdp"}) {
    Weights wanted, wanted_averages;
    for (const bool reloads : {false, true}) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const std::string path = scratch("frozen.safetensors");
        Net net(7);
        const auto engine = wrap_as(net, mesh_of(world), Layout{policy});
        const auto optimizer = optim::build(config, engine->optimizer_params());
        train_steps(net, *engine, *optimizer, 0, 2);
        net.blocks[0]->w1.set_requires_grad(false);
        train_steps(net, *engine, *optimizer, 2, 3);
        if (reloads) {
          state::save_state(*engine, *optimizer, path);
          state::load_state(*engine, *optimizer, path);
        }
        net.blocks[0]->w1.set_requires_grad(true);
        train_steps(net, *engine, *optimizer, 3, kSteps);
        const Weights weights = weights_of(*engine);
        engine->swap_averages(*optimizer);
        const Weights averages = weights_of(*engine);
        if (world->rank() != 0) return;
        if (!reloads) wanted = weights, wanted_averages = averages;
        expect_equal(weights, wanted, policy);
        expect_equal(averages, wanted_averages, policy);
      });
    }
  }
}

TEST(State, WithoutAveragesLetsThemBeginWithTheParameters) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const std::string path = scratch("no-averages.safetensors");
    plan::OptimConfig config = adamw();
    config.weight_decay = 0.0;
    Net net(7), same(8);
    const auto engine = wrap_as(net, mesh_of(world), Layout{"fsdp"}),
               other = wrap_as(same, mesh_of(world), Layout{"fsdp"});
    const auto plain = optim::build(config, engine->optimizer_params());
    train_steps(net, *engine, *plain, 0, 2);
    state::save_state(*engine, *plain, path);
    config.ema = 0.999;
    const auto averaging = optim::build(config, other->optimizer_params());
    state::load_state(*other, *averaging, path, {.missing = true});
    other->swap_averages(*averaging);
    expect_equal(weights_of(*other), weights_of(*engine), "averages");
  });
}

TEST(State, OfLocalSgdIsSavedWhereRanksHaveAveraged) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const std::string path = scratch("local.safetensors");
    Net net(7);
    const auto engine = parallel::data_parallel(
        net, mesh_of(world), {.hook = {.hook = parallel::Hook::kLocalSgd, .local_steps = 2}});
    const auto optimizer = optim::build(momentum(), engine->optimizer_params());
    train_steps(net, *engine, *optimizer, 0, 1);
    const std::vector<std::string> words = {"1 steps after the last averaging", "average_parameters()"};
    expect_refusal([&] { state::save_weights(*engine, path); }, words);
    expect_refusal([&] { state::save_state(*engine, *optimizer, path); }, words);
    expect_refusal([&] { state::full_state(*engine); }, words);
    expect_refusal([&] { state::sharded_state(*engine, *optimizer); }, words);
    engine->average_parameters();
    state::save_weights(*engine, path);
    train_steps(net, *engine, *optimizer, 1, 2);
    expect_refusal([&] { state::save_weights(*engine, path); }, words);
    train_steps(net, *engine, *optimizer, 2, 3);
    state::save_state(*engine, *optimizer, path);
    train_steps(net, *engine, *optimizer, 3, 4);
    state::load_weights(*engine, path);
    state::save_weights(*engine, path);
  });
}

}  // namespace
}  // namespace trireme
