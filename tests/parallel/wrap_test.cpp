// The engine around modules that know nothing of it: plain torch modules, against the same training on one
// rank without an engine.
#include "trireme/parallel/wrap.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "tests/support/spawn.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme {
namespace {

using comm::World;
using parallel::DataParallel;
using test::run_ranks;

at::Tensor random(uint64_t seed, at::IntArrayRef shape, double scale = 1.0) {
  at::Tensor values = at::empty(shape);
  auto* const out = values.mutable_data_ptr<float>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    out[i] = static_cast<float>(
        scale * (static_cast<double>(mix64(seed, static_cast<uint64_t>(i)) >> 11) * 0x1p-53 * 2.0 - 1.0));
  }
  return values;
}

/// relu(x W1 + b1) W2 + x, four of them, then a head. Every second block shares its first matrix with the one
/// before when `tied`; each can have a frozen or an idle parameter.
struct Block : torch::nn::Module {
  Block(uint64_t seed, int64_t width, const at::Tensor& shared) {
    w1 = register_parameter("w1", shared.defined() ? shared : random(seed, {width, width}, 0.3));
    b1 = register_parameter("b1", random(seed + 1, {width}, 0.1));
    w2 = register_parameter("w2", random(seed + 2, {width, width}, 0.3));
  }
  at::Tensor forward(const at::Tensor& x) const {
    return x + at::matmul(at::relu(at::matmul(x, w1) + b1), w2);
  }
  at::Tensor w1, b1, w2;
};

struct ModuleListImpl : torch::nn::Module {};  // a container by its name, as torch::nn::ModuleList is

struct Net : torch::nn::Module {
  explicit Net(uint64_t seed, bool twice = false) : runs_twice(twice) {
    auto list = std::make_shared<ModuleListImpl>();
    for (uint64_t i = 0; i < 4; ++i) {
      blocks.push_back(std::make_shared<Block>(seed + 10 * i, kWidth, at::Tensor()));
      list->register_module(std::to_string(i), blocks.back());
    }
    register_module("blocks", list);
    head = register_parameter("head", random(seed + 99, {kWidth, 3}, 0.3));
  }
  at::Tensor forward(at::Tensor x) const {
    for (const auto& block : blocks) x = block->forward(x);
    if (runs_twice) x = blocks[1]->forward(x);
    return at::matmul(x, head);
  }
  static constexpr int64_t kWidth = 10;
  bool runs_twice;
  std::vector<std::shared_ptr<Block>> blocks;
  at::Tensor head;
};

constexpr int64_t kBatch = 12;
constexpr int64_t kSteps = 6;

at::Tensor inputs(int64_t step) {
  return random(1000 + static_cast<uint64_t>(step), {kBatch, Net::kWidth});
}
at::Tensor targets(int64_t step) {
  return random(2000 + static_cast<uint64_t>(step), {kBatch, 3});
}
at::Tensor loss_sum(const Net& net, const at::Tensor& x, const at::Tensor& y) {
  return (net.forward(x) - y).square().sum();
}

using Weights = std::map<std::string, at::Tensor>;

/// Plain gradient descent with plain autograd.
Weights reference(Net& net, double lr = 0.05) {
  for (int64_t step = 0; step < kSteps; ++step) {
    net.zero_grad();
    (loss_sum(net, inputs(step), targets(step)) / static_cast<double>(kBatch)).backward();
    const at::NoGradGuard no_grad;
    for (auto& param : net.parameters()) {
      if (param.grad().defined()) param.sub_(param.grad() * lr);
    }
  }
  Weights weights;
  for (const auto& entry : net.named_parameters()) weights[entry.key()] = entry.value().detach().clone();
  return weights;
}

std::unique_ptr<DataParallel> wrap(Net& net, const comm::Mesh& mesh, parallel::WrapOptions options) {
  const bool shards = plan::find_policy(options.policy).shard_parameters;
  return shards ? parallel::fully_shard(net, mesh, options) : parallel::data_parallel(net, mesh, options);
}

Weights weights_of(const DataParallel& engine) {
  Weights weights;
  engine.visit_weights(
      [&](const std::string& name, const at::Tensor& weight) { weights[name] = weight.clone(); });
  return weights;
}

void expect_close(const Weights& got, const Weights& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size());
  for (const auto& [name, weight] : wanted) {
    const double difference = (got.at(name) - weight).norm().item<double>();
    EXPECT_LT(difference, 1e-5 * weight.norm().item<double>()) << what << ": " << name;
  }
}

plan::OptimConfig descent() {
  plan::OptimConfig config;
  config.name = "sgd";
  config.momentum = 0.0;
  config.weight_decay = 0.0;
  return config;
}

/// Trains `net` on this rank's rows and returns the weights.
Weights train(Net& net, DataParallel& engine, const comm::Mesh& mesh, double lr = 0.05) {
  const auto optimizer = optim::build(descent(), engine.optimizer_params());
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor x = inputs(step).chunk(mesh.dp->size())[rank],
                     y = targets(step).chunk(mesh.dp->size())[rank];
    engine.backward(loss_sum(net, x, y), 1.0 / static_cast<double>(kBatch));
    engine.step(*optimizer, lr);
  }
  return weights_of(engine);
}

comm::Mesh mesh_of(const std::shared_ptr<World>& world) {
  return comm::make_mesh(world, plan::MeshShape::fit({}, world->size()));
}

/// The words that a LogicError of `call` holds.
template <typename Call>
void expect_refusal(const Call& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    for (const auto& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << word << " in " << error.what();
  }
}

TEST(Wrap, EveryPolicyTrainsAPlainModuleAsOneRankDoes) {
  at::set_num_threads(1);
  for (const bool twice : {false, true}) {
    Net plain(7, twice);
    const Weights wanted = reference(plain);
    for (const char* policy : {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp:shard_grad_op"}) {
      for (int64_t ranks = 1; ranks <= 4; ++ranks) {
        run_ranks(ranks, [&](std::shared_ptr<World> world) {
          const comm::Mesh mesh = mesh_of(world);
          Net net(7 + static_cast<uint64_t>(world->rank()), twice);  // rank 0's values count
          const auto engine = wrap(net, mesh, {.policy = policy, .bucket_mib = 0.0005});
          expect_close(train(net, *engine, mesh), wanted, fmt::format("{} on {}", policy, ranks));
        });
      }
    }
  }
}

TEST(Wrap, FullyShardHoldsOneBlockAtATime) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = parallel::fully_shard(net, mesh, {.overlap = false});
    ASSERT_EQ(engine->units().size(), 5u) << "the root and four blocks";
    const auto gathered = [&] {
      int64_t count = 0;
      for (const auto& unit : engine->units()) count += unit->storage_owner().storage().nbytes() > 0;
      return count;
    };
    EXPECT_EQ(gathered(), 0);
    const at::Tensor loss = loss_sum(net, inputs(0).narrow(0, 0, 6), targets(0).narrow(0, 0, 6));
    EXPECT_LE(gathered(), 2) << "the root and the last block";
    engine->backward(loss);
    EXPECT_LE(gathered(), 1) << "the root";
  });
}

TEST(Wrap, FrozenParametersShareAUnitAndStayAsTheyAre) {
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    Net plain(7);
    const auto freeze = [](Net& net) {
      net.blocks[0]->w1.requires_grad_(false);
      for (auto& param : net.blocks[2]->parameters()) param.requires_grad_(false);
    };
    freeze(plain);
    const Weights wanted = reference(plain);
    run_ranks(3, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Net net(7);
      freeze(net);
      const auto engine = wrap(net, mesh, {.policy = policy});
      expect_close(train(net, *engine, mesh), wanted, policy);
    });
  }
}

TEST(Wrap, UnusedParametersAreNamedOrCountAsZero) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    for (const char* policy : {"ddp", "fsdp"}) {
      Net net(7);
      net.blocks[3]->register_parameter("idle", at::ones({4}));
      const auto engine = wrap(net, mesh, {.policy = policy});
      expect_refusal([&] { engine->backward(loss_sum(net, inputs(0), targets(0))); },
                     {"blocks.3.idle", "1 parameters", "Unused::kZero"});
    }
    for (const char* policy : {"ddp", "fsdp"}) {
      Net net(7);
      net.blocks[3]->register_parameter("idle", at::ones({4}));
      const auto engine = wrap(net, mesh, {.policy = policy, .unused = parallel::Unused::kZero});
      const Weights weights = train(net, *engine, mesh);
      EXPECT_TRUE(at::equal(weights.at("blocks.3.idle"), at::ones({4})));
      Net plain(7);
      Weights wanted = reference(plain);
      wanted["blocks.3.idle"] = at::ones({4});
      expect_close(weights, wanted, policy);
    }
  });
}

TEST(Wrap, ARankMaySkipABlockThatOthersUse) {
  // Rank 1 leaves out block 1 in every step; what it would have contributed is zero.
  const auto body = [](std::shared_ptr<World> world, const char* policy, Weights& out) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine =
        wrap(net, mesh, {.policy = policy, .bucket_mib = 0.0005, .unused = parallel::Unused::kZero});
    if (world->rank() == 1) net.blocks.erase(net.blocks.begin() + 1);
    const Weights weights = train(net, *engine, mesh);
    if (world->rank() == 0) out = weights;
  };
  Weights ddp, zero2;
  run_ranks(2, [&](std::shared_ptr<World> world) { body(world, "ddp", ddp); });
  run_ranks(2, [&](std::shared_ptr<World> world) { body(world, "zero2", zero2); });
  expect_close(ddp, zero2, "ddp and zero2");
  // One process that adds up both losses.
  Net net(7);
  for (int64_t step = 0; step < kSteps; ++step) {
    net.zero_grad();
    const auto x = inputs(step).chunk(2), y = targets(step).chunk(2);
    at::Tensor loss = loss_sum(net, x[0], y[0]);
    const auto skipped = net.blocks[1];
    net.blocks.erase(net.blocks.begin() + 1);
    loss = loss + loss_sum(net, x[1], y[1]);
    net.blocks.insert(net.blocks.begin() + 1, skipped);
    (loss / static_cast<double>(kBatch)).backward();
    const at::NoGradGuard no_grad;
    for (auto& param : net.parameters()) param.sub_(param.grad() * 0.05);
  }
  Weights wanted;
  for (const auto& entry : net.named_parameters()) wanted[entry.key()] = entry.value().detach().clone();
  expect_close(ddp, wanted, "one process");
}

TEST(Wrap, ARankThatSkipsAShardedBlockIsToldWhichAndWhere) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = parallel::fully_shard(net, mesh);
    if (world->rank() == 1) net.blocks.erase(net.blocks.begin() + 1);
    const double started = monotonic_seconds();
    expect_refusal([&] { engine->backward(loss_sum(net, inputs(0), targets(0))); },
                   {"all_gather", "blocks.1", "blocks.2", "on group rank"});
    EXPECT_LT(monotonic_seconds() - started, 5.0) << "not the deadline";
  });
}

TEST(Wrap, UnevenInputsEndTogetherWithTheRightMeans) {
  // Rank r has 1 + r batches of 4 rows; a step's mean is over the rows that there are.
  constexpr int64_t kRows = 4;
  const auto batch = [](int64_t rank, int64_t step) {
    const auto seed = static_cast<uint64_t>(100 * rank + step);
    return std::pair(random(seed, {kRows, Net::kWidth}), random(seed + 50, {kRows, 3}));
  };
  constexpr int64_t kRanks = 3;
  Net plain(7);
  for (int64_t step = 0; step < kRanks; ++step) {
    plain.zero_grad();
    int64_t rows = 0;
    at::Tensor loss = at::zeros({});
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      if (step >= 1 + rank) continue;
      const auto [x, y] = batch(rank, step);
      loss = loss + loss_sum(plain, x, y);
      rows += kRows;
    }
    (loss / static_cast<double>(rows)).backward();
    const at::NoGradGuard no_grad;
    for (auto& param : plain.parameters()) param.sub_(param.grad() * 0.05);
  }
  Weights wanted;
  for (const auto& entry : plain.named_parameters()) wanted[entry.key()] = entry.value().detach().clone();

  for (const char* policy : {"ddp", "zero1", "fsdp", "fsdp:shard_grad_op"}) {
    run_ranks(kRanks, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Net net(7);
      const auto engine = wrap(net, mesh, {.policy = policy, .bucket_mib = 0.0005});
      const auto optimizer = optim::build(descent(), engine->optimizer_params());
      int64_t step = 0, last = 1 + world->rank();
      for (; engine->any_rank(step < last); ++step) {
        double rows = 0.0;
        if (step < last) {
          const auto [x, y] = batch(world->rank(), step);
          engine->backward(loss_sum(net, x, y));
          rows = kRows;
        } else {
          engine->shadow_micro_batch();
        }
        double all_rows = 0.0;
        for (const auto& rank : comm::gather_scalars(*mesh.dp, {rows})) all_rows += rank[0];
        engine->step(*optimizer, 0.05, 1.0 / all_rows);
      }
      EXPECT_EQ(step, kRanks);
      expect_close(weights_of(*engine), wanted, policy);
    });
  }
}

TEST(Wrap, MicroBatchesOfDifferentSizesAddUpToOneMean) {
  Net plain(7);
  const Weights wanted = reference(plain);
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Net net(7);
      const auto engine = wrap(net, mesh, {.policy = policy});
      const auto optimizer = optim::build(descent(), engine->optimizer_params());
      for (int64_t step = 0; step < kSteps; ++step) {
        int64_t row = world->rank() == 0 ? 0 : 7;
        for (const int64_t rows :
             world->rank() == 0 ? std::vector<int64_t>{3, 3, 1} : std::vector<int64_t>{2, 2, 1}) {
          const at::Tensor x = inputs(step).narrow(0, row, rows), y = targets(step).narrow(0, row, rows);
          row += rows;
          engine->backward(loss_sum(net, x, y), 1.0 / static_cast<double>(kBatch), rows == 1);
        }
        engine->step(*optimizer, 0.05);
      }
      expect_close(weights_of(*engine), wanted, policy);
    });
  }
}

TEST(Wrap, SparseGradientsArriveDense) {
  for (const bool shards : {false, true}) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      torch::nn::Module net;
      const at::Tensor table = net.register_parameter("table", at::zeros({10, 4}));
      const auto engine = shards ? parallel::fully_shard(net, mesh) : parallel::data_parallel(net, mesh);
      const at::Tensor rows = at::tensor({world->rank(), int64_t{7}});
      engine->backward(at::embedding(table, rows, -1, false, /*sparse=*/true).sum());
      const auto optimizer = optim::build(descent(), engine->optimizer_params());
      engine->step(*optimizer, 0.5);
      at::Tensor expected = at::zeros({10, 4});
      for (const int64_t row : {0, 1, 7, 7}) expected[row] -= 0.5;
      engine->visit_weights(
          [&](const std::string&, const at::Tensor& weight) { EXPECT_TRUE(at::equal(weight, expected)); });
    });
  }
}

TEST(Wrap, BuffersTakeRankZerosValues) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    at::Tensor mean =
        net.register_buffer("running_mean", at::full({3}, static_cast<float>(world->rank() + 1)));
    parallel::sync_buffers(net, mesh);
    EXPECT_TRUE(at::equal(mean, at::ones({3})));
  });
}

TEST(Wrap, RefusesWhatItCannotTake) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    expect_refusal([&] { parallel::data_parallel(net, mesh, {.policy = "fsdp"}); },
                   {"fsdp:full_shard", "fully_shard"});
    expect_refusal([&] { parallel::fully_shard(net, mesh, {.policy = "zero9"}); }, {"zero9", "zero"});
    expect_refusal([&] { parallel::fully_shard(net, mesh, {.blocks = {"blocks.7"}}); },
                   {"blocks.7", "no block"});
    expect_refusal(
        [&] {
          parallel::fully_shard(net, mesh, {.blocks = {"blocks", "blocks.1"}});
        },
        {"blocks.1", "within block blocks"});
    const auto engine = parallel::data_parallel(net, mesh);
    expect_refusal([&] { parallel::data_parallel(net, mesh); }, {"wrapped already"});
    expect_refusal([&] { loss_sum(net, inputs(0), targets(0)).backward(); }, {"engine.backward(loss)"});
    torch::nn::Module empty;
    expect_refusal([&] { parallel::data_parallel(empty, mesh); }, {"no parameters"});
    torch::nn::Module single;  // fills its unit without padding
    single.register_parameter("weight", at::ones({8, 8}));
    const auto wrapped = parallel::data_parallel(single, mesh);
    expect_refusal([&] { parallel::data_parallel(single, mesh); }, {"wrapped already"});
    Net integers(7);
    integers.head = integers.register_parameter("steps", at::zeros({2}, at::kLong), false);
    expect_refusal([&] { parallel::data_parallel(integers, mesh); }, {"steps", "Long", "floating point"});
  });
}

}  // namespace
}  // namespace trireme
