// Pipelines that record what they do.
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <numeric>
#include <thread>

#include "tests/parallel/layouts.h"
#include "tests/parallel/pipeline_net.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using plan::IdleCause;
using plan::ScheduleName;
using test::PipelineRun;
using namespace std::chrono_literals;

/// A step of `run` on ranks as threads, after one in which shapes and memory settle; `rank 0`'s report.
plan::PipelineReport report_of(const PipelineRun& run) {
  plan::PipelineReport report;
  const plan::Schedule schedule = test::schedule_of(run);
  test::run_ranks(run.pp * run.dp, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = test::mesh_of(world, run);
    std::vector<parallel::Stage> stages;
    const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
    parallel::Pipeline pipeline(schedule, stages, test::squared_error, mesh, test::options_of(run, schedule));
    const auto optimizers =
        pipeline.optimizers([](auto params) { return optim::build(test::descent(0.05), std::move(params)); });
    for (const bool on : {false, true}) {
      pipeline.record(on);
      pipeline.forward_backward(test::batch(3000, 0), test::batch(4000, 0));
      pipeline.step(optimizers);
    }
    const plan::PipelineReport mine = pipeline.report();
    EXPECT_EQ(mine.clock_error_s, 0.0) << "ranks of one host share a clock";
    if (world->rank() == 0) report = mine;
  });
  return report;
}

TEST(PipelineReport, OfARealStepAddsUp) {
  for (const ScheduleName name : {ScheduleName::kGpipe, ScheduleName::k1F1B, ScheduleName::kZbH1,
                                  ScheduleName::kZbV, ScheduleName::kDualPipe}) {
    const PipelineRun run{.schedule = name, .pp = 2};
    const plan::PipelineReport report = report_of(run);
    ASSERT_EQ(report.measured.ranks.size(), 2u) << run.label();
    const int64_t boundaries = name == ScheduleName::kZbV ? 2 : 1;
    const double message = test::kRows / 8.0 * test::Net::kWidth * sizeof(float);
    for (size_t rank = 0; rank < 2; ++rank) {
      const plan::RankUse& use = report.measured.ranks[rank];
      EXPECT_GT(use.busy, 0.0);
      EXPECT_NEAR(std::accumulate(use.idle_causes.begin(), use.idle_causes.end(), 0.0), use.idle, 1e-9)
          << run.label();
      // What the links counted, and what the schedule sends.
      EXPECT_EQ(use.sent_bytes, 8 * boundaries * message) << run.label();
      EXPECT_EQ(report.predicted.ranks[rank].sent_bytes, use.sent_bytes) << run.label();
      EXPECT_GT(use.peak_bytes, 0.0) << run.label();
      EXPECT_NEAR(report.predicted.ranks[rank].peak_bytes, use.peak_bytes, 0.05 * use.peak_bytes)
          << run.label() << ", rank " << rank;
      size_t updates = 0;
      for (const plan::StageEvent& event : report.events[rank])
        updates += event.kind == plan::ActionKind::kUpdate;
      EXPECT_EQ(updates, 1u) << run.label();
    }
    EXPECT_GT(report.after_s, 0.0);
    for (const plan::StageUse& stage : report.measured.stages) EXPECT_GE(stage.backward_queue, 1);
  }
}

TEST(PipelineReport, ShowsThat1F1BHoldsLessThanGpipe) {
  const auto peak = [](ScheduleName name) {
    return report_of({.schedule = name, .pp = 2}).measured.ranks[0].peak_bytes;
  };
  // 2 of 8 micro-batches in flight.
  EXPECT_NEAR(peak(ScheduleName::k1F1B), 0.25 * peak(ScheduleName::kGpipe),
              0.02 * peak(ScheduleName::kGpipe));
}

/// Stage 1 of two takes 18 ms longer in each forward pass.
TEST(PipelineReport, FindsTheSlowStage) {
  struct Slow : torch::nn::Module {
    explicit Slow(std::chrono::milliseconds time) : pause(time) {
      w = register_parameter("w", at::ones({4}));
    }
    at::Tensor forward(const at::Tensor& x) const {
      std::this_thread::sleep_for(pause);
      return x * w;
    }
    std::chrono::milliseconds pause;
    at::Tensor w;
  };
  const plan::Schedule schedule = plan::make_schedule(ScheduleName::k1F1B, {2, 8});
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = test::mesh_of(world, {.pp = 2});
    const auto stage = std::make_shared<Slow>(world->rank() == 0 ? 2ms : 20ms);
    parallel::Pipeline pipeline(schedule, {parallel::make_stage(world->rank(), stage)}, test::squared_error,
                                mesh, {.record = true});
    pipeline.forward_backward(at::ones({8, 4}), at::zeros({8, 4}));
    pipeline.skip_step();
    pipeline.forward_backward(at::ones({8, 4}), at::zeros({8, 4}));
    const plan::PipelineReport report = pipeline.report();
    EXPECT_GE(report.costs.forward[0], 2e-3);
    EXPECT_GE(report.costs.forward[1], 20e-3);
    EXPECT_LT(report.costs.forward[0], 0.5 * report.costs.forward[1]);
    const auto& causes = report.measured.ranks[0].idle_causes;
    const double imbalance = causes[static_cast<size_t>(IdleCause::kImbalance)];
    EXPECT_GT(imbalance, 0.5 * report.measured.ranks[0].idle) << "rank 0 waits for rank 1, seven times 18 ms";
    // Its medians give the step's length.
    EXPECT_NEAR(report.predicted.seconds, report.measured.seconds, 0.25 * report.measured.seconds);
    pipeline.skip_step();
  });
}

TEST(Pipeline, BlockingSendsChangeNoBitsAndAreRefusedWhereRanksWouldWaitForEver) {
  const auto norm = [](ScheduleName name, int64_t pp, int64_t chunks, bool blocking) {
    const PipelineRun run{.schedule = name, .pp = pp, .chunks = chunks};
    const plan::Schedule schedule = test::schedule_of(run);
    double last = 0.0;
    test::run_ranks(pp, [&](const std::shared_ptr<comm::World>& world) {
      const comm::Mesh mesh = test::mesh_of(world, run);
      std::vector<parallel::Stage> stages;
      const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
      parallel::PipelineOptions options = test::options_of(run, schedule);
      options.blocking_sends = blocking;
      parallel::Pipeline pipeline(schedule, stages, test::squared_error, mesh, options);
      for (int64_t step = 0; step < 3; ++step) {
        pipeline.forward_backward(test::batch(3000, step), test::batch(4000, step));
        const double mine = pipeline.grad_norm();
        if (world->rank() == 0) last = mine;
        pipeline.skip_step();
      }
    });
    return last;
  };
  for (const ScheduleName name :
       {ScheduleName::kGpipe, ScheduleName::k1F1B, ScheduleName::kDualPipe, ScheduleName::kDualPipeV}) {
    EXPECT_EQ(norm(name, 4, 1, true), norm(name, 4, 1, false)) << plan::name(name);
  }
  EXPECT_THROW(norm(ScheduleName::kLoopedBfs, 2, 2, true), ConfigError);
}

TEST(PipelineReport, OfNoStepIsRefused) {
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    const PipelineRun run{.pp = 2};
    const plan::Schedule schedule = test::schedule_of(run);
    const comm::Mesh mesh = test::mesh_of(world, run);
    std::vector<parallel::Stage> stages;
    const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
    parallel::Pipeline pipeline(schedule, stages, test::squared_error, mesh);
    EXPECT_THROW(pipeline.report(), LogicError);
    pipeline.record(true);
    EXPECT_THROW(pipeline.report(), LogicError);
  });
}

}  // namespace
}  // namespace trireme
