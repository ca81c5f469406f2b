// What a module of one's own may hold, and how engines stand to all that is around them: buffers, aliases,
// dtypes, names, hooks, other engines.
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/parallel/every_layout.h"
#include "tests/support/refusal.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/schedule.h"
#include "trireme/state/state_file.h"

namespace trireme::test {
namespace {

using comm::World;
using torch::optim::SGD;
using torch::optim::SGDOptions;

std::unique_ptr<parallel::DataParallel> wrap_any(torch::nn::Module& module, const comm::Mesh& mesh,
                                                 const std::string& policy) {
  const parallel::WrapOptions options = {.policy = policy};
  return plan::find_policy(policy).shard_parameters ? parallel::fully_shard(module, mesh, options)
                                                    : parallel::data_parallel(module, mesh, options);
}

/// Buffers of many dtypes and layouts whose values depend on `rank`.
std::map<std::string, at::Tensor> buffers_of(int64_t rank) {
  const at::Tensor numbers = at::arange(6, at::kLong).roll(rank);
  std::map<std::string, at::Tensor> buffers = {{"permutation", numbers},
                                               {"mask", numbers > 2},
                                               {"count", at::full({}, 3 + rank, at::kLong)},
                                               {"bytes", numbers.to(at::kByte)},
                                               {"short", numbers.to(at::kShort)},
                                               {"bf16", numbers.to(at::kBFloat16)},
                                               {"double", numbers.to(at::kDouble) + 1e-12},
                                               {"transposed", numbers.to(at::kFloat).view({2, 3}).t()},
                                               {"strided", numbers.to(at::kInt).slice(0, 0, 6, 2)},
                                               {"expanded", at::full({2, 1}, rank, at::kLong).expand({2, 4})},
                                               {"empty", at::zeros({0, 3})}};
  const c10::InferenceMode inference;
  buffers["inference"] = at::full({2}, static_cast<float>(rank));
  return buffers;
}

void expect_buffers(const torch::nn::Module& module, int64_t rank, const std::string& what) {
  const auto wanted = buffers_of(rank);
  for (const auto& entry : module.named_buffers())
    EXPECT_TRUE(at::equal(entry.value(), wanted.at(entry.key()))) << what << ": " << entry.key();
}

TEST(OwnModule, BuffersOfAllDtypesTakeRankZerosValuesAtWrapping) {
  for (const int64_t ranks : {2, 3}) {
    for (const Layout& layout : every_layout(ranks)) {
      run_ranks(ranks, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7);
        for (const auto& [name, buffer] : buffers_of(world->rank())) net.register_buffer(name, buffer);
        const auto engine = wrap_as(net, mesh, layout);
        expect_buffers(net, 0, layout.label(ranks));
        const auto drifted = buffers_of(world->rank() + 1);
        for (auto& entry : net.named_buffers()) {
          const c10::InferenceMode as_made(entry.value().is_inference());
          if (entry.key() != "expanded") entry.value().copy_(drifted.at(entry.key()));
        }
        net.named_buffers()["expanded"].narrow(1, 0, 1).fill_(world->rank() + 1);
        expect_buffers(net, world->rank() + 1, "drifted");
        parallel::sync_buffers(net, mesh);
        expect_buffers(net, 1, "synchronised");
      });
    }
  }
}

TEST(OwnModule, BuffersThatAreNotRankZerosInShapeOrDtypeAreNamed) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    const bool first = world->rank() == 0;
    const auto net_with = [](const at::Tensor& buffer) {
      auto net = std::make_shared<Net>(7);
      net->register_buffer("mask", buffer);
      return net;
    };
    const auto refuses = [&](const std::shared_ptr<Net>& net, const std::string& mine,
                             const std::string& other) {
      const std::vector<std::string> words =
          first ? std::vector<std::string>{"rank 1 has a different module than rank 0"}
                : std::vector<std::string>{"rank 1 has 'buffer " + mine, "where rank 0 has 'buffer " + other};
      for (const char* policy : {"ddp", "fsdp"})
        expect_refusal([&] { wrap(*net, mesh, {.policy = policy}); }, words);
      const at::Tensor buffer = net->named_buffers()["mask"], before = buffer.clone();
      expect_refusal([&] { parallel::sync_buffers(*net, mesh); }, words);
      EXPECT_TRUE(at::equal(buffer, before));
    };
    refuses(net_with(at::full({first ? 2 : 4}, world->rank(), at::kLong)), "mask Long[4]", "mask Long[2]");
    refuses(net_with(at::full({2}, 1, first ? at::kLong : at::kInt)), "mask Int[2]", "mask Long[2]");
  });
}

/// Holds a tensor beside its parameter.
struct Aliased : torch::nn::Module {
  explicit Aliased(const std::function<at::Tensor(const at::Tensor&)>& alias_of) {
    weight = register_parameter("weight", random(1, {4, 4}));
    register_parameter("other", random(2, {4}));
    alias = alias_of(weight);
  }
  at::Tensor weight, alias;
};

TEST(OwnModule, AnAliasOfAParameterThatIsKeptBesideItIsNamed) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> aliases = {
      [](const at::Tensor& weight) { return weight.t(); },
      [](const at::Tensor& weight) { return weight.detach(); },
      [](const at::Tensor& weight) { return weight.data(); },
      [](const at::Tensor& weight) { return weight.slice(0, 1, 2); },
      [](const at::Tensor& weight) { return at::matmul(weight.t(), weight.t()); }};  // by its graph
  for (const Layout& layout : every_layout(2)) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world, layout);
      for (const auto& alias_of : aliases) {
        Aliased module(alias_of);
        expect_refusal([&] { wrap_any(module, mesh, layout.policy); },
                       {"parameter weight of", "Make it in forward()", "clone()", "earlier passes"});
        module.alias = at::Tensor();
        const auto engine = wrap_any(module, mesh, layout.policy);
      }
    });
  }
  run_ranks(2, [](std::shared_ptr<World> world) {  // one rank alone keeps it
    Aliased module([&](const at::Tensor& weight) { return world->rank() == 1 ? weight.t() : weight; });
    expect_refusal([&] { wrap_any(module, mesh_of(world), "fsdp"); },
                   world->rank() == 1 ? std::vector<std::string>{"parameter weight of"}
                                      : std::vector<std::string>{"rank 1 failed", "parameter weight of"});
  });
  run_ranks(1, [](std::shared_ptr<World> world) {  // the parameter is the alias
    const at::Tensor kept = random(1, {3, 4});
    torch::nn::Module module;
    module.register_parameter("weight", kept.t());
    expect_refusal([&] { wrap_any(module, mesh_of(world), "ddp"); }, {"parameter weight of"});
  });
}

/// A module whose parameters hold each other's memory in ways that are right.
struct Sound : torch::nn::Module {
  Sound() {
    transposed = register_parameter("transposed", random(1, {3, 4}).t());
    const auto halves = random(2, {8, 2}).chunk(2);
    register_parameter("lower", halves[0]);
    register_parameter("upper", halves[1]);
    register_parameter("tied", transposed);
    register_parameter("detached", random(3, {4}).detach());
    register_parameter("both", random(4, {2, 3}).detach().t());
    handle = transposed;
    register_module("lstm", lstm);
    register_module("layer", layer);
    register_buffer("view", register_buffer("whole", at::zeros({4})).narrow(0, 1, 2));
  }
  at::Tensor transposed, handle;
  torch::nn::LSTM lstm{3, 3};
  torch::nn::TransformerEncoderLayer layer{
      torch::nn::TransformerEncoderLayerOptions(4, 2).dim_feedforward(4)};
};

TEST(OwnModule, HandlesGradientsGraphsAndOptimizersOfBeforeAreNoAliases) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    for (const Layout& layout : every_layout(2)) {
      Sound module;
      const std::vector<at::Tensor> params = module.parameters();
      torch::optim::AdamW optimizer(params, torch::optim::AdamWOptions(1e-3));
      at::Tensor loss;
      for (const at::Tensor& param : params)
        loss = loss.defined() ? loss + param.square().sum() : param.sum();
      loss = loss + module.transposed.t().matmul(module.transposed).sum();
      loss.backward();
      optimizer.step();
      const auto view = module.handle;
      for (int times = 0; times < 2; ++times)  // its parameters come back from the first engine
        EXPECT_NO_THROW(wrap_any(module, mesh_of(world, layout), layout.policy)) << layout.label(2);
    }
  });
}

TEST(OwnModule, Fp64ParametersAreRefusedByName) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    for (const char* policy : {"ddp", "fsdp"}) {
      for (const bool trains : {true, false}) {
        Net net(7);
        net.register_parameter("fine", at::ones({2}, at::kDouble), trains);
        expect_refusal([&] { wrap(net, mesh, {.policy = policy}); },
                       {"parameter fine", "is Double", "parameter.to(at::kFloat)"});
        at::Tensor fine = net.named_parameters()["fine"];
        fine.set_data(fine.to(at::kFloat));
        EXPECT_NO_THROW(wrap(net, mesh, {.policy = policy}));
      }
      torch::nn::Module complex;
      complex.register_parameter("extra", at::ones({2}, at::kComplexFloat));
      expect_refusal([&] { wrap_any(complex, mesh, policy); },
                     {"parameter extra", "is ComplexFloat", "floating-point"});
    }
  });
}

TEST(OwnModule, WhatFilesOfWeightsCannotHoldIsNamedBeforeTraining) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    const auto refuses = [&](const std::function<void(Net&)>& change, const std::vector<std::string>& words) {
      for (const char* policy : {"ddp", "fsdp"}) {
        Net net(7);
        change(net);
        expect_refusal([&] { wrap(net, mesh, {.policy = policy}); }, words);
      }
    };
    refuses([](Net& net) { net.register_buffer("rotations", at::ones({2}, at::kComplexDouble)); },
            {"rotations", "ComplexDouble", "plain member"});
    refuses([](Net& net) { net.register_buffer("graph", at::eye(3).to_sparse()); },
            {"graph", "Sparse", "plain member"});
    refuses([](Net& net) { net.register_parameter("a\xff", at::ones({2})); }, {"not UTF-8", "another name"});
    refuses([](Net& net) { net.register_buffer("\xc3(", at::ones({2})); }, {"not UTF-8"});
    refuses([](Net& net) { net.register_parameter("__metadata__", at::ones({2})); },
            {"__metadata__", "reserved"});
    refuses([](Net& net) { net.register_parameter("__metadata__", net.head); }, {"__metadata__", "reserved"});
  });
}

TEST(OwnModule, WeightsThatLeadOutOfTheRangeOfGradientsAreRefused) {
  Net plain(7);
  (loss_sum(plain, inputs(0), targets(0)) / static_cast<double>(kBatch)).backward();
  const at::Tensor wanted = plain.head.grad();
  run_ranks(2, [&](std::shared_ptr<World> world) {
    for (const char* policy : {"ddp", "zero2", "fsdp"}) {
      const comm::Mesh mesh = mesh_of(world);
      Net net(7);
      const auto engine = wrap(net, mesh, {.policy = policy});
      const auto rank = static_cast<size_t>(mesh.dp_rank);
      const auto differentiate = [&](double weight) {
        engine->backward(loss_sum(net, inputs(0).chunk(2)[rank], targets(0).chunk(2)[rank]) / 6.0, weight);
      };
      for (const double weight : {1e-300, 1e-44, 1e-38, 1e38, 1e300})
        expect_refusal([&] { differentiate(weight); },
                       {"has the weight", "out of range", "only their ratios"});
      double norm = 0.0;
      for (const double weight : {1.0, 1e-20, 1e20}) {
        differentiate(weight);
        const double measured = engine->grad_norm();
        if (weight == 1.0) norm = measured;
        EXPECT_NEAR(measured, norm, 1e-4 * norm) << policy << " with weight " << weight;
        engine->skip_step();
      }
      EXPECT_GT(norm, wanted.norm().item<double>() * 0.999);
    }
  });
}

TEST(OwnModule, AMeshAlongWhichNothingIsSplitIsRefused) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape({1, 1, 1, 1, 2}));
    const std::vector<std::string> words = {"2 ranks along tp", "parameter", "is not split", "tp of 1"};
    Net net(7);
    expect_refusal([&] { parallel::data_parallel(net, mesh); }, words);
    expect_refusal([&] { parallel::fully_shard(net, mesh); }, words);
    const auto values = [](const std::string&, const plan::Region&, at::Tensor& out) { out.zero_(); };
    expect_refusal(
        [&] { const parallel::DataParallel engine(net, parallel::block_units(net, {}), mesh, {}, values); },
        words);
  });
}

/// Which tokens they have is their module's affair.
TEST(OwnModule, RanksAlongCpAreRanksOfData) {
  std::array<std::string, 2> digests;
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape({1, 1, 1, 2, 1}));
    EXPECT_EQ(mesh.dp->size(), 2);
    EXPECT_EQ(mesh.dp_rank, 0);
    const auto rank = static_cast<size_t>(world->rank());
    Net net(7 + rank);
    const auto engine = parallel::fully_shard(net, mesh);
    digests[rank] = parallel::weights_digest(*engine);
  });
  EXPECT_EQ(digests[0], digests[1]);
  EXPECT_NE(digests[0], "");
}

/// A hook on an activation, an input and a leaf outside of the module see gradients times loss_factor().
TEST(OwnModule, LossFactorIsWhatAllButParametersSee) {
  for (const Layout& layout : every_layout(2)) {
    for (const bool sums : {false, true}) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7);
        const auto engine = wrap(
            net, mesh,
            {.policy = layout.policy, .average = sums ? parallel::Average::kSum : parallel::Average::kMean});
        const at::Tensor x = inputs(0).requires_grad_(), scale = at::ones({1}).requires_grad_();
        at::Tensor seen;
        const auto loss = [&] {
          const at::Tensor out = net.forward(x) * scale;
          if (out.requires_grad()) out.register_hook([&](const at::Tensor& grad) { seen = grad; });
          return (out - targets(0)).square().sum();
        };
        Net plain(7);
        (plain.forward(x) * scale - targets(0)).square().sum().backward();
        const at::Tensor wanted = x.grad().clone(), wanted_scale = scale.grad().clone();
        for (const double weight : {1.0, 32.0}) {
          x.mutable_grad().reset();
          scale.mutable_grad().reset();
          engine->backward(loss(), weight);
          const double factor = engine->loss_factor(weight);
          EXPECT_EQ(factor, sums ? weight : weight / 2);
          EXPECT_TRUE(at::allclose(x.grad() / factor, wanted, 1e-5)) << layout.label(2) << weight;
          EXPECT_TRUE(at::allclose(scale.grad() / factor, wanted_scale, 1e-5)) << layout.label(2);
          EXPECT_TRUE(at::allclose(seen / factor, 2 * (net.forward(x) - targets(0)).detach(), 1e-5));
          engine->skip_step();
        }
      });
    }
  }
}

void set_trainable(torch::nn::Module& module, bool on) {
  for (at::Tensor& param : module.parameters()) param.requires_grad_(on);
}

/// As the losses of a generator and a discriminator: each step of one goes through the other.
TEST(OwnModule, AStepThroughTheModuleOfAnotherEngineNeedsItFrozen) {
  struct Pair {
    Net made{7};
    Block judge{50, 3};
    at::Tensor loss(int64_t step, int64_t rows_from, int64_t rows) const {
      return judge.forward(made.forward(inputs(step).narrow(0, rows_from, rows))).square().sum() /
             static_cast<double>(rows);
    }
  };
  Pair plain;
  SGD first(plain.made.parameters(), SGDOptions(0.02)), second(plain.judge.parameters(), SGDOptions(0.02));
  for (int64_t step = 0; step < 4; ++step) {
    first.zero_grad();
    second.zero_grad();
    plain.loss(step, 0, kBatch).backward();
    step % 2 == 0 ? first.step() : second.step();
  }
  const Weights wanted = copies(parameters_of(plain.made)), wanted_judge = copies(parameters_of(plain.judge));
  for (const Layout& layout : every_layout(2)) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world, layout);
      Pair pair;
      const auto made = wrap_as(pair.made, mesh, layout), judge = wrap_any(pair.judge, mesh, layout.policy);
      SGD first_here(made->optimizer_tensors(), SGDOptions(0.02)),
          second_here(judge->optimizer_tensors(), SGDOptions(0.02));
      const int64_t rows = kBatch / 2, from = rows * mesh.dp_rank;
      expect_refusal([&] { made->backward(pair.loss(0, from, rows)); },
                     {"another engine's backward()", "set requires_grad to false"});
      for (int64_t step = 0; step < 4; ++step) {
        const bool makes = step % 2 == 0;
        set_trainable(pair.judge, !makes);
        set_trainable(pair.made, makes);
        const auto& engine = makes ? made : judge;
        engine->backward(pair.loss(step, from, rows));
        engine->step(makes ? first_here : second_here);
      }
      expect_close(weights_of(*made), wanted, layout.label(2));
      expect_close(weights_of(*judge), wanted_judge, layout.label(2));
    });
  }
}

}  // namespace
}  // namespace trireme::test
