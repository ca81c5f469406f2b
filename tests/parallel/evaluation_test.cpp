// Forward passes without gradients over uneven data: between training steps, within one, and after
// exceptions.
#include "trireme/parallel/evaluation.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>

#include "tests/parallel/plain_net.h"
#include "tests/support/engine_on_model.h"
#include "tests/support/spawn.h"
#include "tests/support/tiny_training.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;
using parallel::Keep;

constexpr std::array<Keep, 2> kBothWays = {Keep::kWhole, Keep::kByUnit};

/// Batches [begin, end) of 5: of two ranks the first has none, of three they have 0, 1 and 4.
std::pair<int64_t, int64_t> batches_of(int64_t rank, int64_t ranks) {
  if (ranks == 3 && rank == 1) return {0, 1};
  if (rank + 1 < ranks) return {0, 0};
  return {ranks == 3 ? 1 : 0, 5};
}

double loss_of(const Net& net, int64_t batch) {
  const at::Tensor loss = loss_sum(net, inputs(100 + batch), targets(100 + batch));
  EXPECT_FALSE(loss.requires_grad());
  return loss.item<double>();
}

double evaluate(const Net& net, parallel::DataParallel& engine, const comm::Mesh& mesh, Keep keep) {
  auto [batch, end] = batches_of(mesh.dp_rank, mesh.dp->size());
  double sum = 0.0, rows = 0.0;
  auto evaluation = engine.evaluate(keep);
  while (evaluation.next(batch < end)) {
    sum += loss_of(net, batch++);
    rows += kBatch;
  }
  EXPECT_EQ(batch, end) << "every batch has had its pass";
  return evaluation.mean(sum, rows);
}

int64_t gathered_bytes(const parallel::DataParallel& engine) {
  int64_t bytes = 0;
  for (const auto& unit : engine.units())
    bytes += static_cast<int64_t>(unit->params().front().second.storage().nbytes());
  return bytes;
}

TEST(Evaluation, UnevenBatchesHaveTheLossOfOneRankUnderEveryPolicyAndChangeNothing) {
  at::set_num_threads(1);
  for (const bool twice : {false, true}) {
    Net plain(7, twice);
    double wanted = 0.0;
    for (int64_t batch = 0; batch < 5; ++batch) {
      const at::NoGradGuard no_grad;
      wanted += loss_of(plain, batch) / (5 * kBatch);
    }
    for (const char* policy : {"ddp", "zero2", "fsdp", "fsdp:shard_grad_op"}) {
      for (int64_t ranks = 1; ranks <= 3; ++ranks) {
        for (const bool peer_memory : kBothTransports) {
          run_ranks(
              ranks,
              [&](std::shared_ptr<World> world) {
                const comm::Mesh mesh = mesh_of(world);
                Net net(7, twice), untouched(7, twice);
                const auto engine = wrap(net, mesh, {.policy = policy, .bucket_mib = 0.0005});
                for (const Keep keep : kBothWays)
                  EXPECT_NEAR(evaluate(net, *engine, mesh, keep), wanted, 1e-6 * wanted) << policy;
                const Weights got = test::train(net, *engine, mesh);
                for (const Keep keep : kBothWays) EXPECT_LT(evaluate(net, *engine, mesh, keep), wanted);
                const auto other = wrap(untouched, mesh, {.policy = policy, .bucket_mib = 0.0005});
                for (const auto& [name, weight] : test::train(untouched, *other, mesh))
                  EXPECT_TRUE(at::equal(got.at(name), weight)) << policy << " " << name;
              },
              20.0, 90.0, peer_memory);
        }
      }
    }
  }
}

/// One step of two micro-batches; `between` is called at every place where an evaluation may stand.
template <typename Between>
Weights step_with(const char* policy, const comm::Mesh& mesh, const Between& between) {
  Net net(7);
  const auto engine = wrap(net, mesh, {.policy = policy, .bucket_mib = 0.0005});
  const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  for (int64_t step = 0; step < 3; ++step) {
    const auto x = inputs(step).chunk(2 * mesh.dp->size()), y = targets(step).chunk(2 * mesh.dp->size());
    for (size_t micro = 0; micro < 2; ++micro) {
      const at::Tensor loss = loss_sum(net, x[2 * rank + micro], y[2 * rank + micro]);
      between(net, *engine);  // a graph waits for its backward pass
      micro == 1 ? engine->backward(loss) : engine->accumulate(loss);
      between(net, *engine);  // gradients add up, or wait for the update
    }
    engine->step(*optimizer);
    between(net, *engine);
  }
  return weights_of(*engine);
}

TEST(Evaluation, MayStandAnywhereInAStep) {
  for (const char* policy : {"ddp", "zero1", "fsdp", "fsdp:shard_grad_op"}) {
    for (const Keep keep : kBothWays) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        const Weights wanted = step_with(policy, mesh, [](auto&, auto&) {});
        const Weights got = step_with(policy, mesh, [&](const Net& net, parallel::DataParallel& engine) {
          evaluate(net, engine, mesh, keep);
        });
        for (const auto& [name, weight] : wanted)
          EXPECT_TRUE(at::equal(got.at(name), weight)) << policy << " " << name;
      });
    }
  }
}

TEST(Evaluation, AnExceptionThatAllRanksThrowHarmsNothing) {
  for (const char* policy : {"zero2", "fsdp"}) {
    for (const Keep keep : kBothWays) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        const Weights wanted = step_with(policy, mesh, [](auto&, auto&) {});
        const Weights got = step_with(policy, mesh, [&](const Net& net, parallel::DataParallel& engine) {
          const int64_t before = gathered_bytes(engine);
          EXPECT_THROW(
              {
                auto evaluation = engine.evaluate(keep);
                EXPECT_TRUE(evaluation.next(true));
                net.blocks[1]->forward(inputs(0));
                throw std::runtime_error("a batch that cannot be read");
              },
              std::runtime_error);
          EXPECT_LE(gathered_bytes(engine), before);
          EXPECT_TRUE(at::GradMode::is_enabled());
          evaluate(net, engine, mesh, keep);
        });
        for (const auto& [name, weight] : wanted)
          EXPECT_TRUE(at::equal(got.at(name), weight)) << policy << " " << name;
      });
    }
  }
}

TEST(Evaluation, ByUnitHoldsFewUnitsAlsoOnARankWithoutBatches) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = parallel::fully_shard(net, mesh, {.overlap = false});
    const int64_t before = engine->sent_bytes();
    auto evaluation = engine->evaluate(Keep::kByUnit);
    int64_t batches = world->rank() == 0 ? 2 : 0;
    while (evaluation.next(batches > 0)) {
      --batches;
      at::Tensor x = inputs(0);
      for (const auto& block : net.blocks) {
        x = block->forward(x);
        EXPECT_LE(gathered_bytes(*engine), engine->most_gathered_bytes());
        EXPECT_LT(gathered_bytes(*engine), engine->whole_bytes());
      }
    }
    EXPECT_LT(gathered_bytes(*engine), engine->whole_bytes() / 4) << "the root at most";
    const std::vector<std::vector<double>> sent =
        comm::gather_scalars(*mesh.all, {static_cast<double>(engine->sent_bytes() - before)});
    EXPECT_EQ(sent[0], sent[1]) << "both took part in the same gathers";
    EXPECT_GT(sent[0][0], 0.0);
  });
}

TEST(Evaluation, ServesModulesThatAnnounceTheirUnits) {
  const plan::ModelConfig config = tiny_model(plan::ModelFamily::kLlama);
  const plan::ModelFacts facts = plan::describe(config, 8);
  double alone = 0.0;
  for (int64_t ranks = 1; ranks <= 3; ++ranks) {
    for (const Keep keep : kBothWays) {
      run_ranks(ranks, [&](std::shared_ptr<World> world) {
        EngineOnModel trained(config, facts, world, {.policy = plan::find_policy("fsdp")}, 11);
        const comm::Mesh mesh = mesh_of(world);
        for (int64_t round = 0; round < 2; ++round) {
          auto [batch, end] = batches_of(world->rank(), ranks);
          double sum = 0.0;
          const double count = static_cast<double>(end - batch);
          auto evaluation = trained.engine.evaluate(keep);
          while (evaluation.next(batch < end)) {
            const at::Tensor tokens = tiny_tokens(batch++, 2, config.vocab_size);
            sum += trained.model->loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8)).item<double>();
          }
          const double loss = evaluation.mean(sum, count);
          if (ranks == 1) alone = loss;
          EXPECT_NEAR(loss, alone, 1e-6);
        }
      });
    }
  }
}

TEST(Evaluation, WorksWithReplicasOfShards) {
  Net plain(7);
  double wanted = 0.0;
  for (int64_t batch = 0; batch < 5; ++batch) {
    const at::NoGradGuard no_grad;
    wanted += loss_of(plain, batch) / (5 * kBatch);
  }
  for (const char* policy : {"fsdp:hybrid_shard", "fsdp:hybrid_shard_zero2"}) {
    for (const Keep keep : kBothWays) {
      run_ranks(4, [&](std::shared_ptr<World> world) {
        plan::ParallelConfig axes;
        axes.dp_replicate = 2;
        const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit(axes, 4));
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy});
        EXPECT_NEAR(evaluate(net, *engine, mesh, keep), wanted, 1e-6 * wanted) << policy;
        test::train(net, *engine, mesh);
        EXPECT_LT(evaluate(net, *engine, mesh, keep), wanted);
      });
    }
  }
}

TEST(Evaluation, MayStandBetweenForwardAndBackwardOfAModelThatAnnouncesItsUnits) {
  const plan::ModelConfig config = tiny_model(plan::ModelFamily::kGpt2);
  const plan::ModelFacts facts = plan::describe(config, 8);
  for (const int64_t kept : {0, 1, 2}) {  // sharded between forward and backward over all ranks, none, two
    std::set<std::string> digests;
    std::mutex mutex;
    for (const std::optional<Keep> keep : {std::optional<Keep>(), {Keep::kWhole}, {Keep::kByUnit}}) {
      run_ranks(4, [&](std::shared_ptr<World> world) {
        parallel::Options options{.policy = plan::find_policy("fsdp")};
        options.policy.reshard_after_forward = kept;
        EngineOnModel trained(config, facts, world, options, 11);
        const auto optimizer = optim::adamw(trained.engine.optimizer_params());
        for (int64_t step = 0; step < 2; ++step) {
          const at::Tensor tokens =
              tiny_tokens(step, 8, config.vocab_size).chunk(4)[static_cast<size_t>(world->rank())];
          const at::Tensor x = tokens.narrow(1, 0, 8), y = tokens.narrow(1, 1, 8);
          const at::Tensor loss = trained.model->loss(x, y);
          if (keep) {
            auto evaluation = trained.engine.evaluate(*keep);
            bool mine = world->rank() != 1;
            for (; evaluation.next(mine); mine = false) trained.model->loss(x, y);
          }
          trained.engine.backward(loss);
          trained.engine.step(*optimizer);
        }
        const std::string digest = parallel::weights_digest(trained.engine);
        const std::lock_guard lock(mutex);
        digests.insert(digest);
      });
    }
    EXPECT_EQ(digests.size(), 1u) << "reshard_after_forward " << kept;
  }
}

TEST(PassWithoutGradients, BetweenForwardAndBackwardChangesNothingOfWhatARankWithoutDataRepeats) {
  const plan::ModelConfig config = tiny_model(plan::ModelFamily::kGpt2);
  const plan::ModelFacts facts = plan::describe(config, 8);
  std::set<std::string> digests;
  std::mutex mutex;
  for (const bool between : {false, true}) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      EngineOnModel trained(config, facts, world, {.policy = plan::find_policy("fsdp")}, 11);
      const auto optimizer = optim::adamw(trained.engine.optimizer_params());
      for (int64_t step = 0; step < 3; ++step) {
        if (step == 2 && world->rank() == 1) {
          trained.engine.shadow_micro_batch();
        } else {
          const at::Tensor tokens = tiny_tokens(step, 4, config.vocab_size).narrow(0, 2 * world->rank(), 2);
          const at::Tensor x = tokens.narrow(1, 0, 8), y = tokens.narrow(1, 1, 8);
          const at::Tensor loss = trained.model->loss(x, y);
          if (between && step < 2) {
            const at::NoGradGuard no_grad;
            trained.model->loss(x, y);
          }
          trained.engine.backward(loss);
        }
        trained.engine.step(*optimizer);
      }
      const std::string digest = parallel::weights_digest(trained.engine);
      const std::lock_guard lock(mutex);
      digests.insert(digest);
    });
  }
  EXPECT_EQ(digests.size(), 1u);
}

/// What `call` throws; empty: nothing.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(Evaluation, RanksThatRunDifferentUnitsAreAllToldWhich) {
  run_ranks(3, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = parallel::fully_shard(net, mesh);
    const auto skipped = net.blocks[1];
    if (world->rank() == 2) net.blocks.erase(net.blocks.begin() + 1);
    const double started = monotonic_seconds();
    const std::string error = error_of([&] {
      auto evaluation = engine->evaluate(Keep::kByUnit);
      while (evaluation.next(world->rank() > 0)) net.forward(inputs(0));
    });
    EXPECT_LT(monotonic_seconds() - started, 5.0);
    for (const char* word : {"rank 2", "gathers blocks.2", "rank 1", "gathers blocks.1", "Keep::kWhole"})
      EXPECT_NE(error.find(word), std::string::npos) << word << " in " << error;
    if (world->rank() == 2) net.blocks.insert(net.blocks.begin() + 1, skipped);
    EXPECT_GT(evaluate(net, *engine, mesh, Keep::kByUnit), 0.0) << "it can be used again";
  });
}

TEST(Evaluation, SeesWhatAnOptimizerOfTorchHasWritten) {
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    for (const Keep keep : kBothWays) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy});
        torch::optim::SGD optimizer(engine->optimizer_tensors(), 0.05);
        engine->backward(loss_sum(net, inputs(0), targets(0)) / static_cast<double>(kBatch));
        optimizer.step();  // past the engine
        const double got = evaluate(net, *engine, mesh, keep);
        Net other(7);
        const auto told = wrap(other, mesh, {.policy = policy});
        torch::optim::SGD same(told->optimizer_tensors(), 0.05);
        told->backward(loss_sum(other, inputs(0), targets(0)) / static_cast<double>(kBatch));
        told->step(same);
        EXPECT_EQ(got, evaluate(other, *told, mesh, keep)) << policy;
      });
    }
  }
}

TEST(Evaluation, WritesBeforeAndWithinCount) {
  Net plain(7);
  const at::NoGradGuard no_grad;
  plain.blocks[1]->w2.fill_(0.1);
  double wanted = 0.0;
  for (int64_t batch = 0; batch < 5; ++batch) wanted += loss_of(plain, batch) / (5 * kBatch);
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    for (const Keep keep : kBothWays) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const at::NoGradGuard nothing_recorded;
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy});
        net.blocks[1]->w2.fill_(0.1);
        EXPECT_NEAR(evaluate(net, *engine, mesh, keep), wanted, 1e-6 * wanted) << policy;
        {
          const auto evaluation = engine->evaluate(keep);
          net.blocks[2]->b1.fill_(3.0);
        }
        EXPECT_TRUE(at::equal(weights_of(*engine).at("blocks.2.b1"), at::full({Net::kWidth}, 3.0))) << policy;
      });
    }
  }
}

TEST(Evaluation, TrainsNothing) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    for (const char* policy : {"ddp", "fsdp"}) {
      Net net(7);
      const auto engine = wrap(net, mesh, {.policy = policy});
      const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
      engine->backward(loss_sum(net, inputs(0), targets(0)));
      {
        auto evaluation = engine->evaluate();
        EXPECT_TRUE(evaluation.next(true));
        const at::Tensor loss = loss_sum(net, inputs(0), targets(0));
        const std::vector<std::string> errors = {error_of([&] { engine->backward(loss); }),
                                                 error_of([&] { engine->shadow_micro_batch(); }),
                                                 error_of([&] { engine->step(*optimizer); }),
                                                 error_of([&] { const auto second = engine->evaluate(); })};
        for (const std::string& error : errors)
          EXPECT_NE(error.find("evaluate(), where neither training"), std::string::npos) << error;
      }
      engine->step(*optimizer);  // the gradient from before is still there
    }
  });
}

TEST(Evaluation, WithoutBatchesThereIsNoMean) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = parallel::fully_shard(net, mesh);
    for (const Keep keep : kBothWays) {
      auto evaluation = engine->evaluate(keep);
      EXPECT_FALSE(evaluation.next(false));
      EXPECT_NE(error_of([&] { evaluation.mean(0.0, 0.0); }).find("no rank had a batch"), std::string::npos);
    }
  });
}

}  // namespace
}  // namespace trireme
