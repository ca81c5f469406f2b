// Pipelines on ranks as threads: every schedule and every policy inside of stages trains what one piece does.
#include "trireme/parallel/pipeline.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "tests/parallel/layouts.h"
#include "tests/parallel/pipeline_net.h"
#include "trireme/state/state.h"
#include "trireme/state/state_file.h"

namespace trireme {
namespace {

using plan::ScheduleName;
using test::PipelineOutcome;
using test::PipelineRun;

constexpr double kLaw = 1e-6;

double distance(const test::Weights& got, const test::Weights& wanted) {
  double difference = 0.0, size = 0.0;
  for (const auto& [name, weight] : wanted) {
    difference += (got.at(name) - weight).to(at::kDouble).square().sum().item<double>();
    size += weight.to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(difference / size);
}

void expect_near(const PipelineOutcome& got, const PipelineOutcome& wanted, const std::string& what) {
  ASSERT_EQ(got.losses.size(), wanted.losses.size()) << what;
  for (size_t step = 0; step < got.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], wanted.losses[step], kLaw * wanted.losses[step]) << what;
    EXPECT_NEAR(got.norms[step], wanted.norms[step], kLaw * wanted.norms[step]) << what;
  }
  ASSERT_EQ(got.weights.size(), wanted.weights.size()) << what;
  EXPECT_LE(distance(got.weights, wanted.weights), kLaw) << what;
}

void expect_same_bits(const PipelineOutcome& got, const PipelineOutcome& wanted, const std::string& what) {
  EXPECT_EQ(got.losses, wanted.losses) << what;
  test::expect_equal(got.weights, wanted.weights, what);
}

/// Those that accumulate micro-batches in their order.
std::vector<PipelineRun> one_order(PipelineRun run) {
  std::vector<PipelineRun> runs;
  for (const ScheduleName schedule : plan::all_values<ScheduleName>()) {
    if (schedule == ScheduleName::kLoopedBfs || schedule == ScheduleName::kDualPipe) continue;
    const bool has_chunks =
        schedule == ScheduleName::kInterleaved1F1B || schedule == ScheduleName::kInterleavedZb;
    run.schedule = schedule;
    run.chunks = has_chunks ? 2 : 1;
    runs.push_back(run);
  }
  return runs;
}

/// One of each placement, and of each way to reduce: in the last backward pass and after all of them.
std::vector<PipelineRun> one_of_each(PipelineRun run) {
  std::vector<PipelineRun> runs;
  for (const ScheduleName schedule : {ScheduleName::k1F1B, ScheduleName::kZbV, ScheduleName::kDualPipe}) {
    run.schedule = schedule;
    runs.push_back(run);
  }
  return runs;
}

TEST(Law3, SchedulesOfOneOrderGiveTheSameBitsAndThoseOfOnePiece) {
  for (const int64_t pp : {2, 4}) {
    const PipelineOutcome one_piece = test::train_unpipelined({.pp = pp});
    EXPECT_LT(one_piece.losses.back(), 0.9 * one_piece.losses.front())
        << "the runs must have learnt something";
    const PipelineOutcome first = test::train({.schedule = ScheduleName::kGpipe, .pp = pp});
    expect_near(first, one_piece, "gpipe");
    for (const PipelineRun& run : one_order({.pp = pp}))
      expect_same_bits(test::train(run), first, run.label());
    for (const PipelineRun& other : {PipelineRun{.schedule = ScheduleName::kLoopedBfs, .pp = pp, .chunks = 2},
                                     PipelineRun{.schedule = ScheduleName::kDualPipe, .pp = pp}})
      expect_near(test::train(other), one_piece, other.label());
  }
}

TEST(Law3, TiedParametersAndRecomputeChangeNothing) {
  for (const bool tied : {false, true}) {
    const PipelineOutcome one_piece = test::train_unpipelined({.tied = tied, .clip = 0.5});
    EXPECT_GT(one_piece.norms.back(), 0.5) << "clipping must have done something";
    for (PipelineRun run : one_of_each({.tied = tied, .clip = 0.5})) {
      const PipelineOutcome outcome = test::train(run);
      expect_near(outcome, one_piece, run.label());
      if (tied) {
        EXPECT_TRUE(at::equal(outcome.weights.at("embed"), outcome.weights.at("head"))) << run.label();
      }
      run.recompute = true;
      expect_same_bits(test::train(run), outcome, run.label());
    }
  }
}

/// Copies on ranks of the same half of the pipeline, of both halves, and on the same two ranks; of both
/// halves with sums over as many ranks as make no whole tree, where the order of ranks shows.
TEST(Law3, AnyTwoStagesMayBeTiedInBothDirections) {
  for (const int64_t other : {1, 2, 3}) {
    PipelineRun run{.pp = 4, .dp = other == 2 ? 3 : 1, .policy = "zero2"};
    run.more_ties = {{.stage = 0,
                      .name = "block00.w1",
                      .other_stage = other,
                      .other_name = fmt::format("block{:02}.w1", 4 * other)}};
    const PipelineOutcome one_way = test::train(run);
    run.schedule = ScheduleName::kDualPipe;
    const PipelineOutcome two_ways = test::train(run);
    expect_near(two_ways, one_way, run.label());
    EXPECT_TRUE(
        at::equal(two_ways.weights.at("block00.w1"), two_ways.weights.at(run.more_ties.front().other_name)))
        << "stages 0 and " << other;
  }
}

/// Stages 1 and 3 of four have nothing to train.
TEST(Pipeline, HasStagesWithoutParameters) {
  struct Plain : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) const { return x.tanh(); }
  };
  constexpr int64_t kStages = 4, kMicroBatches = 8;
  const auto block_of = [](int64_t stage) {
    return std::make_shared<test::Block>(static_cast<uint64_t>(40 + stage), test::Net::kWidth);
  };
  const auto first = block_of(0), third = block_of(2);
  const at::Tensor wanted = test::squared_error(
      third->forward(first->forward(test::batch(3000, 0)).tanh()).tanh(), test::batch(4000, 0));
  wanted.backward();
  double squares = 0.0;
  for (const auto& block : {first, third}) {
    for (const auto& param : block->parameters())
      squares += param.grad().to(at::kDouble).square().sum().item<double>();
  }
  for (const ScheduleName name : {ScheduleName::k1F1B, ScheduleName::kZbH1, ScheduleName::kDualPipe}) {
    const plan::Schedule schedule = plan::make_schedule(name, {kStages, kMicroBatches});
    test::run_ranks(kStages, [&](const std::shared_ptr<comm::World>& world) {
      const comm::Mesh mesh = test::mesh_of(world, {.pp = kStages});
      std::vector<parallel::Stage> stages;
      for (const int64_t stage : schedule.stages_of(mesh.pp_rank)) {
        stages.push_back(stage % 2 == 0 ? parallel::make_stage(stage, block_of(stage))
                                        : parallel::make_stage(stage, std::make_shared<Plain>()));
      }
      parallel::Pipeline pipeline(schedule, stages, test::squared_error, mesh);
      const at::Tensor loss = pipeline.forward_backward(test::batch(3000, 0), test::batch(4000, 0));
      EXPECT_NEAR(loss.item<double>(), wanted.item<double>(), kLaw * wanted.item<double>());
      EXPECT_NEAR(pipeline.grad_norm(), std::sqrt(squares), kLaw * std::sqrt(squares)) << plan::name(name);
    });
  }
}

/// x w, elementwise; with a pause in the backward pass where `slow`.
struct Scaled : torch::nn::Module {
  explicit Scaled(bool is_slow) : slow(is_slow) { w = register_parameter("w", at::ones({kWidth})); }
  at::Tensor forward(const at::Tensor& x) const {
    at::Tensor y = x * w;
    if (slow) y.register_hook([](const at::Tensor&) { std::this_thread::sleep_for(kPause); });
    return y;
  }
  static constexpr int64_t kWidth = 1024;
  static constexpr std::chrono::milliseconds kPause{20};
  bool slow;
  at::Tensor w;
};

/// What such a stage sends lies in the buffer into which the next message comes, while the first stage is
/// busy.
TEST(Pipeline, StagesThatMakeViewsOfWhatTheyTakeSendWhatTheyWereGiven) {
  struct View : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) const { return x.view({-1, Scaled::kWidth}); }
  };
  constexpr int64_t kMicroBatches = 8, kRowsEach = 1024;
  const at::Tensor factors = at::arange(1, kMicroBatches + 1, at::kFloat).repeat_interleave(kRowsEach);
  const at::Tensor inputs = at::ones({kMicroBatches * kRowsEach, Scaled::kWidth}) * factors.unsqueeze(1),
                   targets = at::zeros_like(inputs);
  Scaled first(/*is_slow=*/false), last(/*is_slow=*/false);
  test::squared_error(last.forward(first.forward(inputs)), targets).backward();
  const double wanted = std::sqrt(2.0) * first.w.grad().norm().item<double>();
  const plan::Schedule schedule = plan::make_schedule(ScheduleName::kGpipe, {3, kMicroBatches});
  test::run_ranks(3, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = test::mesh_of(world, {.pp = 3});
    const parallel::Stage stage =
        world->rank() == 1
            ? parallel::make_stage(1, std::make_shared<View>())
            : parallel::make_stage(world->rank(), std::make_shared<Scaled>(world->rank() == 0));
    parallel::Pipeline pipeline(schedule, {stage}, test::squared_error, mesh);
    pipeline.forward_backward(inputs, targets);
    EXPECT_NEAR(pipeline.grad_norm(), wanted, 1e-5 * wanted);
  });
}

TEST(Pipeline, TrainsBehindAFrozenFirstStage) {
  for (const ScheduleName name : {ScheduleName::k1F1B, ScheduleName::kZbH1, ScheduleName::kDualPipe}) {
    const PipelineRun run{.schedule = name, .pp = 2};
    const plan::Schedule schedule = test::schedule_of(run);
    test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      const comm::Mesh mesh = test::mesh_of(world, run);
      std::vector<parallel::Stage> stages;
      const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
      for (size_t i = 0; i < stages.size(); ++i) {
        for (at::Tensor& param : modules[i]->parameters())
          if (stages[i].index == 0) param.requires_grad_(false);
      }
      parallel::Pipeline pipeline(schedule, stages, test::squared_error, mesh,
                                  test::options_of(run, schedule));
      const auto optimizers = pipeline.optimizers(
          [](auto params) { return optim::build(test::descent(0.05), std::move(params)); });
      double first = 0.0, last = 0.0;
      for (int64_t step = 0; step < 3; ++step) {
        last = pipeline.forward_backward(test::batch(3000, 0), test::batch(4000, 0)).item<double>();
        pipeline.step(optimizers);
        if (step == 0) first = last;
      }
      EXPECT_LT(last, first) << run.label();
    });
  }
}

/// Frozen before the pipeline is made and thawed, frozen and thawed between steps, and never trained: with
/// both copies on one rank (there and back), on two, and two of each (two ways).
TEST(Law3, TiedParametersMayBeFrozenInAnyStep) {
  const std::vector<std::set<int64_t>> cases = {{0, 1}, {1, 3}, {0, 1, 2, 3, 4}};
  for (const std::set<int64_t>& frozen_steps : cases) {
    const PipelineRun base{
        .dp = 2, .micro_batches = 4, .tied = true, .clip = 0.5, .frozen_steps = frozen_steps};
    const PipelineOutcome one_piece = test::train_unpipelined(base);
    EXPECT_GT(one_piece.norms.back(), 0.5) << "clipping must have done something";
    for (const ScheduleName schedule :
         {ScheduleName::k1F1B, ScheduleName::kZbV, ScheduleName::kDualPipe, ScheduleName::kDualPipeV}) {
      PipelineOutcome first;
      for (const auto& layout : test::layouts(2)) {
        if (layout.one_unit) continue;
        PipelineRun run = base;
        run.schedule = schedule;
        run.policy = layout.policy;
        run.replicas = layout.replicas;
        const PipelineOutcome outcome = test::train(run);
        expect_near(outcome, one_piece, run.label());
        EXPECT_TRUE(at::equal(outcome.weights.at("embed"), outcome.weights.at("head"))) << run.label();
        if (first.weights.empty()) first = outcome;
        test::expect_equal(outcome.weights, first.weights, run.label());
      }
    }
  }
}

TEST(Law3, HoldsOnEightRanks) {
  const PipelineOutcome one_piece = test::train_unpipelined({.pp = 8, .micro_batches = 16});
  for (const PipelineRun& run : one_of_each({.pp = 8, .micro_batches = 16}))
    expect_near(test::train(run), one_piece, run.label());
  const PipelineOutcome halves = test::train_unpipelined({.pp = 4, .dp = 2});
  for (PipelineRun run : one_of_each({.pp = 4, .dp = 2, .policy = "zero2"}))
    expect_near(test::train(run), halves, run.label());
}

TEST(Law3, HoldsInBf16) {
  for (const char* policy : {"ddp", "fsdp"}) {
    const PipelineRun base{
        .dp = 2, .micro_batches = 4, .policy = policy, .tied = true, .compute = at::kBFloat16};
    const PipelineOutcome first = test::train(base);
    EXPECT_LT(first.losses.back(), 0.9 * first.losses.front());
    for (const ScheduleName schedule : {ScheduleName::kGpipe, ScheduleName::kZbH1, ScheduleName::kZbV}) {
      PipelineRun run = base;
      run.schedule = schedule;
      expect_same_bits(test::train(run), first, run.label());
    }
  }
}

TEST(Law3, EveryPolicyWorksInsideOfStages) {
  const PipelineRun base{.dp = 2, .micro_batches = 4, .tied = true, .clip = 0.5};
  const PipelineOutcome one_piece = test::train_unpipelined(base);
  for (const PipelineRun& schedule : one_of_each(base)) {
    PipelineOutcome first;
    for (const auto& layout : test::layouts(2)) {
      if (layout.one_unit) continue;
      PipelineRun run = schedule;
      run.policy = layout.policy;
      run.replicas = layout.replicas;
      const PipelineOutcome outcome = test::train(run);
      expect_near(outcome, one_piece, run.label());
      if (first.weights.empty()) first = outcome;
      test::expect_equal(outcome.weights, first.weights, run.label());
    }
  }
}

TEST(PipelineStages, AreSavedAndLoadedByTheirOwnEngines) {
  const PipelineRun run{.pp = 2, .dp = 2, .micro_batches = 2, .policy = "fsdp"};
  const auto folder =
      std::filesystem::temp_directory_path() / fmt::format("trireme-stages-test-{}", ::getpid());
  test::run_ranks(4, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = test::mesh_of(world, run);
    const plan::Schedule schedule = test::schedule_of(run);
    std::vector<parallel::Stage> stages;
    const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
    parallel::Pipeline pipeline(schedule, stages, test::squared_error, mesh, test::options_of(run, schedule));
    parallel::DataParallel& engine = *pipeline.engines().front();
    const std::string path = (folder / fmt::format("stage-{}.safetensors", mesh.pp_rank)).string();
    const test::Weights wanted = test::weights_of(engine);
    state::save_weights(engine, path);
    for (auto& param : modules.front()->parameters()) at::Tensor(param.data()).fill_(0.5);
    state::load_weights(engine, path);
    test::expect_equal(test::weights_of(engine), wanted, path);
    EXPECT_EQ(state::full_state(engine, state::On::kRankZero).empty(), mesh.dp_rank != 0);
  });
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace trireme
