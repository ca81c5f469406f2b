// Single steps of a pipeline: what they evaluate, how they weigh micro-batches, what they hold and send.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/parallel/layouts.h"
#include "tests/parallel/pipeline_rank.h"
#include "tests/support/refusal.h"
#include "tests/support/spawn.h"
#include "trireme/plan/simulate.h"

namespace trireme {
namespace {

using plan::ScheduleName;
using test::PipelineRun;
using test::Rank;

TEST(Pipeline, EvaluatesAsItTrains) {
  for (const ScheduleName name : plan::all_values<ScheduleName>()) {
    const PipelineRun run{.schedule = name, .pp = 2, .dp = 2, .chunks = 1, .policy = "fsdp"};
    test::run_ranks(4, [&](const std::shared_ptr<comm::World>& world) {
      Rank rank(world, run);
      const auto place = static_cast<size_t>(rank.mesh.dp_rank);
      const auto mine = [&](uint64_t kind, int64_t parts) {
        return test::batch(kind, 0).chunk(2)[place].chunk(parts);
      };
      const double trained =
          rank.pipeline
              ->forward_backward(test::batch(3000, 0).chunk(2)[place], test::batch(4000, 0).chunk(2)[place])
              .item<double>();
      const double norm = rank.pipeline->grad_norm();
      // Other numbers of micro-batches, and between the passes of a step and its end.
      for (const int64_t parts : {1, 3, 8}) {
        const double loss = rank.pipeline->evaluate(mine(3000, parts), mine(4000, parts)).item<double>();
        EXPECT_NEAR(loss, trained, 1e-6 * trained) << plan::name(name) << ", " << parts;
      }
      EXPECT_EQ(rank.pipeline->grad_norm(), norm);
      rank.pipeline->skip_step();
      rank.step(test::kRows / 2);  // in the shapes of the first step
      rank.pipeline->skip_step();
      const at::Tensor made =
          rank.pipeline->infer(test::batch(3000, 0), [](const at::Tensor& x) { return x.sum(); });
      const auto last = rank.stages.back().index + 1 == rank.schedule.stages;
      // A single micro-batch goes in the second direction where there are two.
      const bool has = name == ScheduleName::kDualPipe ? rank.mesh.pp_rank == 0 : last;
      EXPECT_EQ(made.defined(), has) << plan::name(name);
    });
  }
}

TEST(Pipeline, WeightsOfZeroStandForMicroBatchesThatAreNotThere) {
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, {.pp = 2});
    const auto inputs = test::batch(3000, 0).chunk(4), targets = test::batch(4000, 0).chunk(4);
    const double half =
        rank.pipeline->evaluate({inputs[0], inputs[1]}, {targets[0], targets[1]}).item<double>();
    const double padded =
        rank.pipeline
            ->evaluate({inputs[0], inputs[1], inputs[2]}, {targets[0], targets[1], targets[2]}, {2, 2, 0})
            .item<double>();
    EXPECT_NEAR(padded, half, 1e-12 * half);
    test::expect_refusal(
        [&] {
          const auto count = static_cast<size_t>(world->rank() + 1);
          rank.pipeline->evaluate({inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(count)},
                                  {targets.begin(), targets.begin() + static_cast<std::ptrdiff_t>(count)});
        },
        {"rank 1 was given 2 micro-batches, rank 0 1"});
  });
}

TEST(Pipeline, WeighsMicroBatchesByTheirRows) {
  const PipelineRun run{.pp = 2, .micro_batches = 4};
  const std::vector<int64_t> rows = {5, 20, 3, 20};
  const std::vector<double> weights(rows.begin(), rows.end());
  test::BlockStage whole(0, test::kBlocks, false, false);
  const at::Tensor wanted = test::squared_error(whole.forward(test::batch(3000, 0)), test::batch(4000, 0));
  wanted.backward();
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, run);
    for (int repeat = 0; repeat < 2; ++repeat) {
      const at::Tensor loss = rank.pipeline->forward_backward(
          test::batch(3000, 0).split_with_sizes(rows), test::batch(4000, 0).split_with_sizes(rows), weights);
      EXPECT_NEAR(loss.item<double>(), wanted.item<double>(), 1e-6 * wanted.item<double>());
      double squares = 0.0;
      for (const auto& [name, param] : test::parameters_of(whole))
        squares += param.grad().to(at::kDouble).square().sum().item<double>();
      EXPECT_NEAR(rank.pipeline->grad_norm(), std::sqrt(squares), 1e-6 * std::sqrt(squares));
      rank.pipeline->skip_step();
    }
  });
}

/// Bits of the parameters of this rank's stages.
test::Weights weights_of_stages(parallel::Pipeline& pipeline) {
  test::Weights all;
  for (const auto& engine : pipeline.engines()) all.merge(test::weights_of(*engine));
  return all;
}

TEST(Pipeline, SkippedStepsLeaveNothingBehind) {
  for (const ScheduleName name : {ScheduleName::k1F1B, ScheduleName::kZbV}) {
    const PipelineRun run{.schedule = name, .pp = 2};
    test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      const auto train = [&](bool skips) {
        Rank rank(world, run);
        const auto optimizers =
            rank.pipeline->optimizers([](auto params) { return optim::build(test::descent(0.1), params); });
        if (skips) rank.step();
        if (skips) rank.pipeline->skip_step();
        rank.step();
        rank.pipeline->step(optimizers);
        return weights_of_stages(*rank.pipeline);
      };
      test::expect_equal(train(true), train(false), run.label());
    });
  }
}

/// Counts micro-batches whose activations are alive.
struct CountsAlive {
  void add(const at::Tensor& activation) {
    alive.push_back(activation.storage().getWeakStorageImpl());
    most = std::max(most, std::ranges::count_if(alive, [](const auto& weak) { return !weak.expired(); }));
  }
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> alive;
  int64_t most = 0;
};

TEST(Pipeline, HoldsActivationsOfAsManyMicroBatchesAsTheSimulatorSays) {
  for (const ScheduleName name : {ScheduleName::kGpipe, ScheduleName::k1F1B}) {
    const PipelineRun run{.schedule = name, .pp = 4};
    const plan::Simulation simulation = plan::simulate(test::schedule_of(run));
    test::run_ranks(4, [&](const std::shared_ptr<comm::World>& world) {
      CountsAlive counts;
      Rank rank(world, run, [&](std::vector<parallel::Stage>& stages) {
        stages[0].forward = [&counts, forward = stages[0].forward](const at::Tensor& x) {
          const at::Tensor y = forward(x), kept = y.sigmoid();  // whose backward pass needs its output
          counts.add(kept);
          return y * kept;
        };
      });
      rank.step();
      const auto place = static_cast<size_t>(world->rank());
      EXPECT_EQ(counts.most, static_cast<int64_t>(simulation.ranks[place].peak_bytes)) << plan::name(name);
      EXPECT_TRUE(std::ranges::all_of(counts.alive, [](const auto& weak) { return weak.expired(); }));
    });
  }
}

TEST(Pipeline, SendsTheBytesOfItsProgram) {
  const PipelineRun run{.schedule = ScheduleName::kInterleaved1F1B, .pp = 2, .chunks = 2};
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, run);
    rank.step();
    rank.pipeline->skip_step();
    rank.pipeline->flush();
    const int64_t first = rank.pipeline->sent_bytes();
    rank.step();
    const auto sends =
        std::ranges::count(rank.pipeline->program().actions, plan::ActionKind::kSend, &plan::Action::kind);
    const int64_t message = test::kRows / run.micro_batches * test::Net::kWidth * 4;
    rank.pipeline->flush();
    EXPECT_EQ(rank.pipeline->sent_bytes() - first, sends * message);
    int64_t buffers = 0;
    for (const auto& [pool, count] : plan::receive_buffers(rank.pipeline->program().actions))
      buffers += count;
    EXPECT_EQ(rank.pipeline->buffer_bytes(), buffers * message);
  });
}

}  // namespace
}  // namespace trireme
