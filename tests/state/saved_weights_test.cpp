// Files of weights: what one layout has saved, every other one and a plain module load.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "tests/parallel/layouts.h"
#include "tests/parallel/normed_net.h"
#include "tests/support/spawn.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/state/state_file.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;

Weights buffers_of(const torch::nn::Module& module) {
  Weights buffers;
  for (const auto& entry : module.named_buffers()) buffers[entry.key()] = entry.value().clone();
  return buffers;
}

/// Trains on two ranks for a few steps and saves the weights; returns what a plain module would have.
Weights save_some(const std::string& path, Weights* buffers = nullptr) {
  Weights saved;
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    NormedNet net(3);
    const auto engine = wrap_as(net, mesh, Layout{"fsdp"});
    const auto optimizer = optim::build(adamw(), engine->optimizer_params());
    train_steps(net, *engine, *optimizer, 0, 2);
    state::save_weights(*engine, path);
    const Weights weights = weights_of(*engine);
    if (world->rank() != 0) return;
    saved = weights;
    if (buffers != nullptr) *buffers = buffers_of(net);
  });
  return saved;
}

TEST(Weights, LoadIntoEveryLayoutBeforeAndBetweenSteps) {
  const std::string path = scratch("weights.safetensors");
  Weights buffers;
  const Weights wanted = save_some(path, &buffers);
  ASSERT_EQ(wanted.size(), static_cast<size_t>(kParams));
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    on_layouts_of({1, 2, 3},
                  [&](const Layout& layout, std::shared_ptr<World> world, const std::string& what) {
                    const comm::Mesh mesh = mesh_of(world, layout);
                    NormedNet net(7);
                    const auto engine = wrap_as(net, mesh, layout, dtype);
                    state::load_weights(*engine, path);
                    expect_equal(weights_of(*engine), wanted, what);
                    expect_equal(buffers_of(net), buffers, what);
                    const auto optimizer = optim::build(adamw(), engine->optimizer_params());
                    train_steps(net, *engine, *optimizer, 0, 1);
                    EXPECT_FALSE(at::equal(weights_of(*engine).at("head"), wanted.at("head"))) << what;
                    state::load_weights(*engine, path);
                    expect_equal(weights_of(*engine), wanted, what + ", after a step");
                    const parallel::DataParallel::Held held(*engine);
                    for (const auto& [name, param] : parameters_of(net))
                      EXPECT_TRUE(at::equal(param, wanted.at(name).to(dtype))) << what << ": " << name;
                    state::load_weights(*engine, path);
                    for (const auto& [name, param] : parameters_of(net))
                      EXPECT_TRUE(at::equal(param, wanted.at(name).to(dtype))) << what << ", held: " << name;
                  });
  }
}

TEST(Weights, OfEveryLayoutAreOneFile) {
  const std::string path = scratch("one.safetensors");
  std::string first;
  on_layouts_of({2}, [&](const Layout& layout, std::shared_ptr<World> world, const std::string& what) {
    const comm::Mesh mesh = mesh_of(world, layout);
    NormedNet net(7);
    const auto engine = wrap_as(net, mesh, layout);
    const auto optimizer = optim::build(momentum(), engine->optimizer_params());
    train_steps(net, *engine, *optimizer, 0, 2);
    state::save_weights(*engine, path);
    if (world->rank() != 0) return;
    std::ifstream file(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    if (first.empty()) first = bytes;
    EXPECT_TRUE(bytes == first) << what;
  });
  const checkpoint::SafetensorsReader reader(path);
  EXPECT_EQ(reader.tensors().size(), static_cast<size_t>(kParams + kBuffers));
  EXPECT_EQ(reader.tensors().at("norm.num_batches_tracked").dtype, at::kLong);
  const std::string alias = reader.tensors().contains("tied") ? "blocks.0.w1" : "tied";
  EXPECT_EQ(reader.metadata().at(alias), alias == "tied" ? "blocks.0.w1" : "tied");
}

TEST(Weights, OfPlainModulesAndOfEnginesAreTheSameFiles) {
  const std::string path = scratch("plain.safetensors"), again = scratch("again.safetensors");
  Weights buffers;
  const Weights wanted = save_some(path, &buffers);
  NormedNet plain(1);
  state::load_weights(plain, path);
  expect_equal(copies(parameters_of(plain)), wanted, "plain");
  expect_equal(buffers_of(plain), buffers, "plain");
  state::save_weights(plain, again);
  run_ranks(1, [&](std::shared_ptr<World> world) {
    NormedNet net(7);
    const auto engine = wrap_as(net, mesh_of(world), Layout{"fsdp"});
    state::load_weights(*engine, again);
    expect_equal(weights_of(*engine), wanted, "engine");
    expect_thrown<LogicError>([&] { state::save_weights(net, path); },
                              {"belongs to an engine", "pass the engine"});
  });
}

/// A net whose tied matrix is two.
struct UntiedNet : NormedNet {
  explicit UntiedNet(uint64_t seed) : NormedNet(seed) {
    const at::NoGradGuard no_grad;
    named_tied() = at::zeros({kWidth, kWidth}).requires_grad_();
  }
  at::Tensor& named_tied() { return *parameters_.find("tied"); }
};

TEST(Weights, OfTiedParametersAreRestoredUnderEveryName) {
  const std::string tied = scratch("tied.safetensors"), untied = scratch("untied.safetensors");
  NormedNet one(3);
  state::save_weights(one, tied);
  UntiedNet two(7);
  state::load_weights(two, tied);
  EXPECT_TRUE(at::equal(two.named_tied(), one.blocks[0]->w1));
  EXPECT_TRUE(at::equal(two.blocks[0]->w1, one.blocks[0]->w1));
  state::save_weights(two, untied);
  NormedNet three(8);
  state::load_weights(three, untied);
  EXPECT_TRUE(at::equal(three.blocks[0]->w1, one.blocks[0]->w1));
}

TEST(Weights, ThatDoNotFitAreNamedAndChangeNothing) {
  const std::string path = scratch("misfit.safetensors");
  Net other(3);
  other.blocks[1]->register_parameter("extra", at::ones({2}));
  state::save_weights(other, path);
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    NormedNet net(7);
    const auto engine = wrap_as(net, mesh, Layout{"fsdp"});
    const Weights before = weights_of(*engine);
    expect_thrown<DataError>(
        [&] { state::load_weights(*engine, path); },
        {"5 missing", "norm.num_batches_tracked", "norm.weight", "1 unexpected", "blocks.1.extra", path});
    expect_equal(weights_of(*engine), before, "refused");
    state::load_weights(*engine, path, {.missing = true, .unexpected = true});
    const Weights after = weights_of(*engine);
    EXPECT_TRUE(at::equal(after.at("head"), other.head));
    EXPECT_TRUE(at::equal(after.at("norm.weight"), before.at("norm.weight")));
  });
  Net wide(3);
  wide.head.set_data(at::ones({Net::kWidth, 4}));
  state::save_weights(wide, path);
  Net net(7);
  expect_thrown<DataError>([&] { state::load_weights(net, path); }, {"head", "[10, 4]", "[10, 3]"});
}

TEST(Weights, ForABufferThatNothingCanBeWrittenToChangeNothing) {
  const std::string path = scratch("expanded.safetensors");
  Net other(3);
  other.register_buffer("scale", at::ones({4}));
  state::save_weights(other, path);
  const auto with_buffer = [](Net& net) { net.register_buffer("scale", at::zeros({1}).expand({4})); };
  run_ranks(2, [&](std::shared_ptr<World> world) {
    Net net(7);
    with_buffer(net);
    const auto engine = wrap_as(net, mesh_of(world), Layout{"fsdp"});
    const Weights before = weights_of(*engine);
    expect_thrown<LogicError>([&] { state::load_weights(*engine, path); },
                              {"[state.file]", "scale [4]", "clone()"});
    expect_equal(weights_of(*engine), before, "refused");
  });
  Net net(7);
  with_buffer(net);
  const Weights before = copies(parameters_of(net));
  expect_thrown<LogicError>([&] { state::load_weights(net, path); }, {"[state.file]", "scale [4]"});
  expect_equal(copies(parameters_of(net)), before, "refused");
}

TEST(Weights, ThatCannotBeWrittenOrReadAreAnErrorOnAllRanksAtOnce) {
  run_ranks(3, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = wrap_as(net, mesh, Layout{"fsdp"});
    const double began = monotonic_seconds();
    expect_thrown<EnvironmentError>([&] { state::save_weights(*engine, "/proc/nowhere/model.safetensors"); },
                                    {"/proc/nowhere"});
    const std::string mine = scratch(fmt::format("only-{}.safetensors", world->rank()));
    if (world->rank() == 1) state::save_weights(Net(7), mine);
    expect_thrown<EnvironmentError>([&] { state::load_weights(*engine, mine); }, {"only-"});
    EXPECT_LT(monotonic_seconds() - began, 5.0);
    EXPECT_EQ(weights_of(*engine).size(), 13u) << "the engine goes on";
    std::filesystem::remove(mine);
  });
}

TEST(Weights, ThatAreVisitedAreCopies) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    Net net(7);
    const auto engine = wrap_as(net, mesh_of(world), Layout{"ddp"});
    const auto optimizer = optim::build(adamw(), engine->optimizer_params());
    Weights visited;
    engine->visit_weights([&](const std::string& name, const at::Tensor& weight) { visited[name] = weight; });
    const Weights before = copies(visited);
    train_steps(net, *engine, *optimizer, 0, 1);
    expect_equal(visited, before, "after a step");
  });
}

}  // namespace
}  // namespace trireme
