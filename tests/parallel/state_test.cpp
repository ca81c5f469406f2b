// Weights and training states in and out: what one layout has saved, every other one loads, and training goes
// on as if it had not ended.
#include "trireme/parallel/state.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/parallel/layouts.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/parallel/state_file.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;
using parallel::On;

std::string scratch(const std::string& name) {
  const auto folder =
      std::filesystem::temp_directory_path() / fmt::format("trireme-state-test-{}", ::getpid());
  std::filesystem::create_directories(folder);
  return (folder / name).string();
}

/// A net with the buffers of a BatchNorm, of which one is an integer, and a matrix under two names.
struct NormedNet : Net {
  explicit NormedNet(uint64_t seed) : Net(seed), norm(kWidth) {
    register_module("norm", norm);
    register_parameter("tied", blocks[0]->w1);
  }
  at::Tensor forward(at::Tensor x) const override {
    const at::Tensor mean = x.to(at::kFloat).mean(0), variance = x.to(at::kFloat).var(0);
    at::Tensor(norm->running_mean).mul_(0.9).add_(mean.detach() * 0.1);
    at::Tensor(norm->running_var).mul_(0.9).add_(variance.detach() * 0.1);
    at::Tensor(norm->num_batches_tracked).add_(1);
    return Net::forward(x * norm->weight + norm->bias);
  }
  torch::nn::BatchNorm1d norm;
};

constexpr int64_t kParams = 15, kBuffers = 3;  // four blocks of three, a head, the norm's two

plan::OptimConfig adamw() {
  plan::OptimConfig config;
  config.lr = 0.01;
  return config;
}
plan::OptimConfig momentum() {
  plan::OptimConfig config = descent(0.01);
  config.momentum = 0.9;
  return config;
}

Weights buffers_of(const torch::nn::Module& module) {
  Weights buffers;
  for (const auto& entry : module.named_buffers()) buffers[entry.key()] = entry.value().clone();
  return buffers;
}

template <typename Body>
void on_every_layout(const std::vector<int64_t>& numbers_of_ranks, const Body& body) {
  at::set_num_threads(1);
  for (const int64_t ranks : numbers_of_ranks) {
    for (const Layout& layout : layouts(ranks)) {
      run_ranks(ranks, [&](std::shared_ptr<World> world) { body(layout, world, layout.label(ranks)); });
    }
  }
}

/// Trains on `ranks` ranks by ddp for a few steps and saves the weights; returns what a plain module would
/// have.
Weights save_some(const std::string& path, Weights* buffers = nullptr) {
  Weights saved;
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    NormedNet net(3);
    const auto engine = wrap_as(net, mesh, Layout{"fsdp"});
    const auto optimizer = optim::build(adamw(), engine->optimizer_params());
    train_steps(net, *engine, *optimizer, 0, 2);
    parallel::save_weights(*engine, path);
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
    on_every_layout(
        {1, 2, 3}, [&](const Layout& layout, std::shared_ptr<World> world, const std::string& what) {
          const comm::Mesh mesh = mesh_of(world, layout);
          NormedNet net(7);
          const auto engine = wrap_as(net, mesh, layout, dtype);
          parallel::load_weights(*engine, path);
          expect_equal(weights_of(*engine), wanted, what);
          expect_equal(buffers_of(net), buffers, what);
          const auto optimizer = optim::build(adamw(), engine->optimizer_params());
          train_steps(net, *engine, *optimizer, 0, 1);
          EXPECT_FALSE(at::equal(weights_of(*engine).at("head"), wanted.at("head"))) << what;
          parallel::load_weights(*engine, path);
          expect_equal(weights_of(*engine), wanted, what + ", after a step");
          const parallel::DataParallel::Held held(*engine);
          for (const auto& [name, param] : parameters_of(net))
            EXPECT_TRUE(at::equal(param, wanted.at(name).to(dtype))) << what << ": " << name;
          parallel::load_weights(*engine, path);
          for (const auto& [name, param] : parameters_of(net))
            EXPECT_TRUE(at::equal(param, wanted.at(name).to(dtype))) << what << ", held: " << name;
        });
  }
}

TEST(Weights, OfEveryLayoutAreOneFile) {
  const std::string path = scratch("one.safetensors");
  std::string first;
  on_every_layout({2}, [&](const Layout& layout, std::shared_ptr<World> world, const std::string& what) {
    const comm::Mesh mesh = mesh_of(world, layout);
    NormedNet net(7);
    const auto engine = wrap_as(net, mesh, layout);
    const auto optimizer = optim::build(momentum(), engine->optimizer_params());
    train_steps(net, *engine, *optimizer, 0, 2);
    parallel::save_weights(*engine, path);
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
  parallel::load_weights(plain, path);
  expect_equal(copies(parameters_of(plain)), wanted, "plain");
  expect_equal(buffers_of(plain), buffers, "plain");
  parallel::save_weights(plain, again);
  run_ranks(1, [&](std::shared_ptr<World> world) {
    NormedNet net(7);
    const auto engine = wrap_as(net, mesh_of(world), Layout{"fsdp"});
    parallel::load_weights(*engine, again);
    expect_equal(weights_of(*engine), wanted, "engine");
    expect_thrown<LogicError>([&] { parallel::save_weights(net, path); }, {"engine's", "pass the engine"});
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
  parallel::save_weights(one, tied);
  UntiedNet two(7);
  parallel::load_weights(two, tied);
  EXPECT_TRUE(at::equal(two.named_tied(), one.blocks[0]->w1));
  EXPECT_TRUE(at::equal(two.blocks[0]->w1, one.blocks[0]->w1));
  parallel::save_weights(two, untied);
  NormedNet three(8);
  parallel::load_weights(three, untied);
  EXPECT_TRUE(at::equal(three.blocks[0]->w1, one.blocks[0]->w1));
}

TEST(Weights, ThatDoNotFitAreNamedAndChangeNothing) {
  const std::string path = scratch("misfit.safetensors");
  Net other(3);
  other.blocks[1]->register_parameter("extra", at::ones({2}));
  parallel::save_weights(other, path);
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    NormedNet net(7);
    const auto engine = wrap_as(net, mesh, Layout{"fsdp"});
    const Weights before = weights_of(*engine);
    expect_thrown<DataError>(
        [&] { parallel::load_weights(*engine, path); },
        {"5 missing", "norm.num_batches_tracked", "norm.weight", "1 unexpected", "blocks.1.extra", path});
    expect_equal(weights_of(*engine), before, "refused");
    parallel::load_weights(*engine, path, {.missing = true, .unexpected = true});
    const Weights after = weights_of(*engine);
    EXPECT_TRUE(at::equal(after.at("head"), other.head));
    EXPECT_TRUE(at::equal(after.at("norm.weight"), before.at("norm.weight")));
  });
  Net wide(3);
  wide.head.set_data(at::ones({Net::kWidth, 4}));
  parallel::save_weights(wide, path);
  Net net(7);
  expect_thrown<DataError>([&] { parallel::load_weights(net, path); }, {"head", "[10, 4]", "[10, 3]"});
}

TEST(Weights, ThatCannotBeWrittenOrReadAreAnErrorOnAllRanksAtOnce) {
  run_ranks(3, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = wrap_as(net, mesh, Layout{"fsdp"});
    const double began = monotonic_seconds();
    expect_thrown<EnvironmentError>(
        [&] { parallel::save_weights(*engine, "/proc/nowhere/model.safetensors"); }, {"/proc/nowhere"});
    const std::string mine = scratch(fmt::format("only-{}.safetensors", world->rank()));
    if (world->rank() == 1) parallel::save_weights(Net(7), mine);
    expect_thrown<EnvironmentError>([&] { parallel::load_weights(*engine, mine); }, {"only-"});
    EXPECT_LT(monotonic_seconds() - began, 5.0);
    EXPECT_EQ(weights_of(*engine).size(), 13u) << "the engine goes on";
    std::filesystem::remove(mine);
  });
}

TEST(State, ShardedPiecesCoverEveryTensorOfTheFullOne) {
  on_every_layout({1, 2, 3}, [](const Layout& layout, std::shared_ptr<World> world, const std::string& what) {
    const comm::Mesh mesh = mesh_of(world, layout);
    NormedNet net(7);
    const auto engine = wrap_as(net, mesh, layout);
    const auto optimizer = optim::build(adamw(), engine->optimizer_params());
    train_steps(net, *engine, *optimizer, 0, 1);
    const auto whole = parallel::full_state(*engine, *optimizer);
    EXPECT_EQ(whole.size(), static_cast<size_t>(4 * kParams + kBuffers)) << what;
    EXPECT_EQ(parallel::full_state(*engine).size(), static_cast<size_t>(kParams + kBuffers)) << what;
    EXPECT_EQ(parallel::full_state(*engine, On::kRankZero).empty(), world->rank() != 0) << what;
    EXPECT_EQ(whole.at("optimizer.step.head").item<int64_t>(), 1) << what;
    std::map<std::string, int64_t> covered;
    for (const parallel::StatePiece& piece : parallel::sharded_state(*engine, *optimizer)) {
      ASSERT_TRUE(whole.contains(piece.name)) << what << ": " << piece.name;
      const at::Tensor& tensor = whole.at(piece.name);
      EXPECT_EQ(tensor.sizes(), at::IntArrayRef(piece.shape)) << what << ": " << piece.name;
      const bool drifts = piece.name.starts_with("norm.running");
      EXPECT_TRUE(drifts || at::equal(piece.values,
                                      tensor.reshape({-1}).narrow(0, piece.range.begin, piece.range.size())))
          << what << ": " << piece.name;
      covered[piece.name] += piece.range.size();
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
  EXPECT_EQ(parallel::load_state(*engine, *optimizer, path), (parallel::Notes{{"step", "3"}}));
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
          parallel::save_state(*engine, *optimizer, path, {{"step", "3"}});
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
          parallel::save_state(*engine, *optimizer, path);
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
            parallel::load_state(*engine, *optimizer, path);
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
    parallel::save_state(*engine, *theirs, path);
    const auto ours = optim::adamw(other->optimizer_params(), {.lr = 0.01});
    parallel::load_state(*other, *ours, path);
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
    expect_thrown<LogicError>([&] { parallel::save_state(*engine, unknown, path); }, {"LBFGS", "AdamW"});
    torch::optim::AdamW strange(net.parameters());
    expect_thrown<LogicError>([&] { parallel::save_state(*engine, strange, path); }, {"optimizer_tensors()"});
  });
}

TEST(State, OfAnotherOptimizerOrNoneIsRefused) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const std::string path = scratch("other-optimizer.safetensors");
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = wrap_as(net, mesh, Layout{"fsdp"});
    const auto first = optim::build(momentum(), engine->optimizer_params());
    train_steps(net, *engine, *first, 0, 1);
    parallel::save_state(*engine, *first, path);
    const auto second = optim::build(adamw(), engine->optimizer_params());
    expect_thrown<DataError>([&] { parallel::load_state(*engine, *second, path); },
                             {"optimizer.exp_avg.", "missing", "optimizer.momentum_buffer.", "unexpected"});
    parallel::load_weights(*engine, path);
    parallel::save_weights(*engine, path);
    expect_thrown<DataError>([&] { parallel::load_state(*engine, *first, path); }, {"no optimizer's state"});
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
      expect_refusal([&] { parallel::save_state(*engine, optimizer, scratch("theirs.safetensors")); },
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
          parallel::save_state(*engine, *optimizer, path);
          parallel::load_state(*engine, *optimizer, path);
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
    parallel::save_state(*engine, *plain, path);
    config.ema = 0.999;
    const auto averaging = optim::build(config, other->optimizer_params());
    parallel::load_state(*other, *averaging, path, {.missing = true});
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
    const std::vector<std::string> words = {"1 steps after their last average", "average_parameters()"};
    expect_refusal([&] { parallel::save_weights(*engine, path); }, words);
    expect_refusal([&] { parallel::save_state(*engine, *optimizer, path); }, words);
    expect_refusal([&] { parallel::full_state(*engine); }, words);
    engine->average_parameters();
    parallel::save_weights(*engine, path);
    train_steps(net, *engine, *optimizer, 1, 2);
    expect_refusal([&] { parallel::save_weights(*engine, path); }, words);
    train_steps(net, *engine, *optimizer, 2, 3);
    parallel::save_state(*engine, *optimizer, path);
    train_steps(net, *engine, *optimizer, 3, 4);
    parallel::load_weights(*engine, path);
    parallel::save_weights(*engine, path);
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
