// The engine around modules that know nothing of it: plain torch modules, against the same training on one
// rank without an engine.
#include "trireme/parallel/wrap.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <new>

#include "tests/parallel/plain_net.h"
#include "tests/support/spawn.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;
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
          expect_close(test::train(net, *engine, mesh), wanted, fmt::format("{} on {}", policy, ranks));
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
      for (const auto& unit : engine->units()) count += unit->params().front().second.storage().nbytes() > 0;
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
      expect_close(test::train(net, *engine, mesh), wanted, policy);
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
      const Weights weights = test::train(net, *engine, mesh);
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
    const Weights weights = test::train(net, *engine, mesh);
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
      const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
      int64_t step = 0, last = 1 + world->rank();
      for (; engine->any_rank(step < last); ++step) {
        if (step < last) {
          const auto [x, y] = batch(world->rank(), step);
          engine->backward(loss_sum(net, x, y) / static_cast<double>(kRows));
        } else {
          engine->shadow_micro_batch();
        }
        engine->step(*optimizer);
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
      const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
      for (int64_t step = 0; step < kSteps; ++step) {
        int64_t row = world->rank() == 0 ? 0 : 7;
        for (const int64_t rows :
             world->rank() == 0 ? std::vector<int64_t>{3, 3, 1} : std::vector<int64_t>{2, 2, 1}) {
          const at::Tensor x = inputs(step).narrow(0, row, rows), y = targets(step).narrow(0, row, rows);
          row += rows;
          const at::Tensor loss = loss_sum(net, x, y) / static_cast<double>(rows);
          const auto weight = static_cast<double>(rows);
          rows == 1 ? engine->backward(loss, weight) : engine->accumulate(loss, weight);
        }
        engine->step(*optimizer);
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
      const parallel::WrapOptions sum = {.average = parallel::Average::kSum};
      const auto engine =
          shards ? parallel::fully_shard(net, mesh, sum) : parallel::data_parallel(net, mesh, sum);
      const at::Tensor rows = at::tensor({world->rank(), int64_t{7}});
      engine->backward(at::embedding(table, rows, -1, false, /*sparse=*/true).sum());
      const auto optimizer = optim::build(descent(0.5), engine->optimizer_params());
      engine->step(*optimizer);
      at::Tensor expected = at::zeros({10, 4});
      for (const int64_t row : {0, 1, 7, 7}) expected[row] -= 0.5;
      engine->visit_weights(
          [&](const std::string&, const at::Tensor& weight) { EXPECT_TRUE(at::equal(weight, expected)); });
    });
  }
}

/// Trains a net whose last block has no elements, on 4 ranks.
void train_with_an_empty_block(std::shared_ptr<World> world, const char* policy, int64_t replicas,
                               const Weights& wanted) {
  plan::ParallelConfig axes;
  axes.dp_replicate = replicas;
  const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
  Net net(7);
  const auto empty = std::make_shared<torch::nn::Module>();
  const at::Tensor none = empty->register_parameter("none", at::zeros({0, 3}));
  net.named_children()["blocks"]->register_module("4", empty);
  const auto engine = wrap(net, mesh,
                           {.policy = policy,
                            .blocks = {"blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4"},
                            .bucket_mib = 1e-6});
  const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor x = inputs(step).chunk(4)[rank], y = targets(step).chunk(4)[rank];
    const auto rows = static_cast<double>(x.size(0));
    engine->backward(loss_sum(net, x, y) / rows + none.sum(), rows);
    EXPECT_GT(engine->grad_norm(), 0.0);
    engine->step(*optimizer);
  }
  Weights got = weights_of(*engine);
  EXPECT_EQ(got.at("blocks.4.none").sizes(), at::IntArrayRef({0, 3}));
  got.erase("blocks.4.none");
  expect_close(got, wanted, policy);
}

TEST(Wrap, ABlockWithoutElementsTakesPart) {
  Net plain(7);
  const Weights wanted = reference(plain);
  for (const bool peer_memory : kBothTransports) {
    const auto train = [&](const char* policy, int64_t replicas) {
      run_ranks(
          4,
          [&](std::shared_ptr<World> world) {
            train_with_an_empty_block(std::move(world), policy, replicas, wanted);
          },
          20.0, 90.0, peer_memory);
    };
    for (const char* policy : {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"}) train(policy, 1);
    for (const int64_t replicas : {1, 2, 4}) {
      train("fsdp:hybrid_shard", replicas);
      train("fsdp:hybrid_shard_zero2", replicas);
    }
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
        {"blocks.1", "inside block blocks"});
    const auto engine = parallel::data_parallel(net, mesh);
    expect_refusal([&] { parallel::data_parallel(net, mesh); }, {"has been wrapped before"});
    expect_refusal([&] { loss_sum(net, inputs(0), targets(0)).backward(); }, {"engine.backward(loss)"});
    torch::nn::Module empty;
    expect_refusal([&] { parallel::data_parallel(empty, mesh); }, {"no parameters"});
    torch::nn::Module single;  // fills its unit without padding
    single.register_parameter("weight", at::ones({8, 8}));
    const auto wrapped = parallel::data_parallel(single, mesh);
    expect_refusal([&] { parallel::data_parallel(single, mesh); }, {"has been wrapped before"});
    Net integers(7);
    integers.head = integers.register_parameter("steps", at::zeros({2}, at::kLong), false);
    expect_refusal([&] { parallel::data_parallel(integers, mesh); }, {"steps", "Long", "floating-point"});
  });
}

TEST(Wrap, RefusesOptionsOutOfTheirBounds) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto refuses = [&](const parallel::WrapOptions& options, const std::vector<std::string>& words) {
      expect_refusal([&] { parallel::data_parallel(net, mesh, options); }, words);
    };
    refuses({.hook = {.local_steps = 0}}, {"hook.local_steps is 0", "1 or more"});
    refuses({.hook = {.rank = 0}}, {"hook.rank is 0"});
    refuses({.hook = {.density = 1.5}}, {"hook.density is 1.5"});
    refuses({.hook = {.density = std::nan("")}}, {"hook.density is nan"});
    refuses({.hook = {.start_step = -1}}, {"hook.start_step is -1"});
    refuses({.compute = at::kInt}, {"compute is Int", "BFloat16"});
    refuses({.compute = at::kHalf}, {"compute is Half", "Float or BFloat16", "CPU"});
    refuses({.reduce = at::kDouble}, {"reduce is Double", "Float or BFloat16"});
    refuses({.reduce = at::kHalf}, {"reduce is Half", "Float or BFloat16", "fixed order"});
    refuses({.prefetch = -1}, {"prefetch is -1"});
    refuses({.bucket_mib = 0.0}, {"bucket_mib is 0"});
    refuses({.bucket_mib = -1.0}, {"bucket_mib is -1"});
    refuses({.bucket_mib = std::numeric_limits<double>::quiet_NaN()}, {"bucket_mib is nan"});
    expect_refusal([&] { parallel::fully_shard(net, mesh, {.min_unit_numel = -1}); },
                   {"min_unit_numel is -1"});
    EXPECT_NO_THROW(parallel::checked({.reduce = at::kHalf, .reduction = parallel::Reduction::kBackend}));
    EXPECT_NO_THROW(parallel::checked({.compute = at::kHalf, .device = at::kCUDA}));
    const auto engine = parallel::data_parallel(net, mesh);
  });
}

TEST(Wrap, ABucketMayBeOfAnySize) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    for (const double mib : {1e30, std::numeric_limits<double>::infinity()}) {
      Net net(7);
      EXPECT_EQ(wrap(net, mesh_of(world), {.policy = "ddp", .bucket_mib = mib})->units().size(), 1u) << mib;
    }
  });
}

TEST(Wrap, RefusesWhatNothingCanBeWrittenTo) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net wide(7);
    wide.register_parameter("gain", at::ones({1}, at::kFloat).expand({3}));
    expect_refusal([&] { wrap(wide, mesh, {.policy = "ddp"}); }, {"[parallel.data_parallel]", "gain [3]"});
  });
}

TEST(Wrap, GivesTheModuleBackWhereAnEngineCannotBeMade) {
  for (const int64_t ranks : {1, 2}) {
    run_ranks(ranks, [](std::shared_ptr<World> world) {
      Net net(7);
      const at::Tensor wanted = net.forward(inputs(0)).detach();
      const Weights values = copies(parameters_of(net));
      bool fails = true;
      const auto read = [&](const std::string& name, const plan::Region& region, at::Tensor& out) {
        if (fails && name.starts_with("blocks.2.")) throw std::bad_alloc();
        out.copy_(values.at(name).reshape({-1}).narrow(0, region.range.begin, out.numel()));
      };
      parallel::Options options;
      options.users_module = true;
      const auto make = [&] {
        const parallel::DataParallel engine(net, parallel::block_units(net, {}), mesh_of(world), options,
                                            read, plan::UseFrom::kOperators);
      };
      EXPECT_THROW(make(), std::bad_alloc);
      EXPECT_TRUE(at::equal(net.forward(inputs(0)), wanted));
      fails = false;
      make();
    });
  }
}

TEST(Wrap, RefusesModulesAndOptionsThatAreNotRankZeros) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    const bool first = world->rank() == 0;
    const auto refuses = [&](torch::nn::Module& module, const parallel::WrapOptions& options,
                             const std::vector<std::string>& words) {
      expect_refusal([&] { parallel::data_parallel(module, mesh, options); },
                     first ? std::vector<std::string>{"rank 1 has a different module than rank 0"} : words);
    };
    torch::nn::Module order, shapes, frozen, same, fewer;
    for (const char* name : {first ? "a" : "b", first ? "b" : "a"})
      order.register_parameter(name, at::full({4}, name[0] == 'a' ? 1.0 : 2.0));
    refuses(order, {}, {"rank 1 has 'parameter b Float[4]' where rank 0 has 'parameter a Float[4]'"});
    EXPECT_EQ(order.named_parameters()["a"][0].item<double>(), 1.0) << "nothing has moved";
    shapes.register_parameter("weight", at::ones({first ? 8 : 9, 4}));
    refuses(shapes, {}, {"weight Float[9, 4]", "weight Float[8, 4]"});
    frozen.register_parameter("weight", at::ones({4}), first);
    refuses(frozen, {}, {"weight Float[4] frozen"});
    fewer.register_parameter("weight", at::ones({4}));
    if (first) fewer.register_parameter("more", at::ones({4}));
    refuses(fewer, {}, {"'no further parameter'", "'parameter more Float[4]'"});
    same.register_parameter("weight", at::ones({4}));
    refuses(same, {.bucket_mib = first ? 1.0 : 2.0}, {"bucket_mib=2", "bucket_mib=1"});
    const auto engine = parallel::data_parallel(same, mesh);
  });
}

}  // namespace
}  // namespace trireme
