// What a pipeline refuses, and how all of its ranks end when one of them fails.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>

#include "tests/parallel/layouts.h"
#include "tests/parallel/pipeline_net.h"
#include "trireme/plan/simulate.h"

namespace trireme {
namespace {

using plan::ScheduleName;
using test::PipelineRun;

/// A rank of a pipeline, ready for steps.
struct Rank {
  Rank(const std::shared_ptr<comm::World>& world, const PipelineRun& run,
       const std::function<void(std::vector<parallel::Stage>&)>& change = {})
      : mesh(test::mesh_of(world, run)), schedule(test::schedule_of(run)) {
    modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
    if (change) change(stages);
    pipeline = std::make_unique<parallel::Pipeline>(schedule, stages, test::squared_error, mesh,
                                                    test::options_of(run, schedule));
  }
  at::Tensor step(int64_t rows = test::kRows) {
    return pipeline->forward_backward(test::batch(3000, 0).narrow(0, 0, rows),
                                      test::batch(4000, 0).narrow(0, 0, rows));
  }

  comm::Mesh mesh;
  plan::Schedule schedule;
  std::vector<parallel::Stage> stages;
  std::vector<std::shared_ptr<test::BlockStage>> modules;
  std::unique_ptr<parallel::Pipeline> pipeline;
};

/// What each rank of a run ends with.
std::vector<std::string> errors_of(const PipelineRun& run,
                                   const std::function<void(const std::shared_ptr<comm::World>&)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(run.pp * run.dp));
  EXPECT_ANY_THROW(test::run_ranks(
      run.pp * run.dp,
      [&](const std::shared_ptr<comm::World>& world) {
        try {
          body(world);
        } catch (const std::exception& error) {
          errors[static_cast<size_t>(world->rank())] = error.what();
          throw;
        }
      },
      /*timeout_s=*/4.0));
  return errors;
}

TEST(PipelineFaults, EveryRankNamesTheStageThatHasThrown) {
  for (const ScheduleName name : {ScheduleName::k1F1B, ScheduleName::kZbV}) {
    const PipelineRun run{.schedule = name, .pp = 4};
    const auto errors = errors_of(run, [&](const std::shared_ptr<comm::World>& world) {
      int64_t passes = 0;
      Rank rank(world, run, [&](std::vector<parallel::Stage>& stages) {
        for (parallel::Stage& stage : stages) {
          if (stage.index != 2) continue;
          stage.forward = [&passes, forward = stage.forward](const at::Tensor& x) {
            if (++passes == 12) throw std::runtime_error("no more");  // in the second step
            return forward(x);
          };
        }
      });
      rank.step();
      rank.pipeline->skip_step();
      rank.step();
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("stage 2 on rank 2 in 'forward 2F3'"), std::string::npos) << error;
      EXPECT_NE(error.find("no more"), std::string::npos) << error;
    }
  }
}

TEST(PipelineFaults, DataParallelRanksOfAFailedStageEndToo) {
  const PipelineRun run{.pp = 2, .dp = 2, .micro_batches = 4, .policy = "fsdp"};
  const auto errors = errors_of(run, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, run, [&](std::vector<parallel::Stage>& stages) {
      if (world->rank() == 3)
        stages[0].forward = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no more"); };
    });
    rank.step();
  });
  for (const std::string& error : errors) EXPECT_NE(error.find("no more"), std::string::npos) << error;
}

/// Logs are by the ranks of the job, not by those of a pipeline.
TEST(PipelineFaults, NamesTheRankOfTheJobAndTheStageThatSends) {
  const PipelineRun run{.pp = 2, .dp = 2, .micro_batches = 4};
  const auto errors = errors_of(run, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, run);
    const auto step = [&](int64_t rows) {
      rank.pipeline->forward_backward(test::batch(3000, 0).narrow(0, 0, rows),
                                      test::batch(4000, 0).narrow(0, 0, rows));
    };
    step(8);
    rank.pipeline->skip_step();
    step(world->rank() % 2 == 0 ? 8 : 4);
  });
  EXPECT_NE(errors[1].find("stage 0 on rank 1 in 'send 1F0 to 1'"), std::string::npos) << errors[1];
}

/// What is not a std::exception is a failure like others.
TEST(PipelineFaults, WhatIsNoExceptionEndsAllRanksToo) {
  const auto errors = errors_of({.pp = 2}, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, {.pp = 2}, [](std::vector<parallel::Stage>& stages) {
      if (stages[0].index == 1) stages[0].forward = [](const at::Tensor&) -> at::Tensor { throw 42; };
    });
    rank.step();
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("stage 1 on rank 1 in 'forward 1F0'"), std::string::npos) << error;
    EXPECT_NE(error.find("no std::exception"), std::string::npos) << error;
  }
}

/// Gives a rank of a pipeline of two, in two data-parallel copies, a step of its own; the others a right one.
/// What each rank says; the step after it runs.
std::vector<std::string> refusals_of(int64_t refusing, const std::function<void(Rank&)>& wrong) {
  const PipelineRun run{.pp = 2, .dp = 2, .micro_batches = 4};
  std::vector<std::string> errors(4);
  const auto began = std::chrono::steady_clock::now();
  test::run_ranks(
      4,
      [&](const std::shared_ptr<comm::World>& world) {
        Rank rank(world, run);
        for (int repeat = 0; repeat < 2; ++repeat) {  // what ranks know of the first step serves no later one
          try {
            world->rank() == refusing ? wrong(rank) : void(rank.step(8));
            ADD_FAILURE() << "rank " << world->rank() << " refuses nothing";
          } catch (const Error& error) {
            errors[static_cast<size_t>(world->rank())] = error.what();
          }
          rank.step(8);
          rank.pipeline->skip_step();
        }
      },
      /*timeout_s=*/60.0);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20)) << "nobody waits in vain";
  return errors;
}

at::Tensor rows(uint64_t kind, int64_t count) {
  return test::batch(kind, 0).narrow(0, 0, count);
}

TEST(PipelineFaults, WhatOneRankRefusesAllRanksRefuseWithItsReason) {
  struct Case {
    int64_t rank;
    std::function<void(Rank&)> wrong;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {3,
       [](Rank& rank) { rank.pipeline->forward_backward(rows(3000, 8), {}); },
       {"0 micro-batches of targets", "rank 3"}},
      {0, [](Rank& rank) { rank.step(7); }, {"inputs of 7 rows", "4 micro-batches"}},
      {1, [](Rank& rank) { rank.step(4); }, {"rank 1", "4 rows of inputs", "rank 3", "8 of targets"}},
      {2,
       [](Rank& rank) {
         rank.pipeline->forward_backward(rows(3000, 8).chunk(4), rows(4000, 8).chunk(4), {1, 1, 1, 2});
       },
       {"rank 2", "weights of micro-batches", "rank 0", "no ones"}},
      {2,
       [](Rank& rank) {
         const at::NoGradGuard no_grad;
         rank.step(8);
       },
       {"rank 2", "gradients are off"}}};
  for (const Case& each : cases) {
    for (const std::string& error : refusals_of(each.rank, each.wrong)) {
      for (const std::string& word : each.words)
        EXPECT_NE(error.find(word), std::string::npos) << word << " in: " << error;
    }
  }
}

/// As on GPUs, where hosts do not wait for each other.
TEST(PipelineFaults, ARankThatRefusesALaterStepEndsThePipelineWhereNobodyAgreesOnIt) {
  const PipelineRun run{.pp = 4, .micro_batches = 8};
  std::vector<std::string> errors(4);
  test::run_ranks(
      4,
      [&](const std::shared_ptr<comm::World>& world) {
        const comm::Mesh mesh = test::mesh_of(world, run);
        const plan::Schedule schedule = test::schedule_of(run);
        std::vector<parallel::Stage> stages;
        const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
        parallel::PipelineOptions options = test::options_of(run, schedule);
        options.agrees_each_step = false;
        parallel::Pipeline pipeline(schedule, stages, test::squared_error, mesh, options);
        pipeline.forward_backward(rows(3000, 8), rows(4000, 8));
        pipeline.skip_step();
        try {
          pipeline.forward_backward(rows(3000, 8), world->rank() == 3 ? at::Tensor() : rows(4000, 8));
        } catch (const Error& error) {
          errors[static_cast<size_t>(world->rank())] = error.what();
        }
        test::expect_refusal([&] { pipeline.forward_backward(rows(3000, 8), rows(4000, 8)); },
                             {"a step has failed"});
      },
      /*timeout_s=*/60.0);
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 3 refuses a step"), std::string::npos) << error;
    EXPECT_NE(error.find("0 micro-batches of targets"), std::string::npos) << error;
  }
}

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

TEST(PipelineFaults, AFailedPipelineSaysSo) {
  const PipelineRun run{.pp = 1};
  test::run_ranks(1, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, run, [](std::vector<parallel::Stage>& stages) {
      stages[0].forward = [](const at::Tensor& x) { return x.index({at::tensor({99})}); };
    });
    test::expect_refusal([&] { rank.step(); }, {"stage 0 on rank 0 in 'forward 0F0'", "out of bounds"});
    test::expect_refusal([&] { rank.step(); }, {"a step has failed", "start again"});
  });
}

TEST(PipelineFaults, NamesBothStagesWhereShapesDoNotFit) {
  const PipelineRun run{.pp = 2};
  const auto taken = errors_of(run, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, run, [](std::vector<parallel::Stage>& stages) {
      if (stages[0].index == 0)
        stages[0].forward = [forward = stages[0].forward](const at::Tensor& x) {
          return forward(x).narrow(1, 0, 7);
        };
    });
    rank.step();
  });
  for (const std::string& error : taken)
    EXPECT_NE(error.find("stage 1 on rank 1 in 'forward 1F0', on (6, 7) Float of stage 0"), std::string::npos)
        << error;
  const auto changed = errors_of(run, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, run);
    rank.step();
    rank.pipeline->skip_step();
    rank.step(test::kRows / 2);
  });
  for (const std::string& error : changed)
    EXPECT_NE(error.find("stage 0 has made (3, 10) Float for micro-batch 0, but stage 1 takes (6, 10) Float"),
              std::string::npos)
        << error;
}

TEST(PipelineFaults, RefusesToCutWhereNoGradientPasses) {
  const PipelineRun run{.pp = 2};
  const auto errors = errors_of(run, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, run, [](std::vector<parallel::Stage>& stages) {
      if (stages[0].index == 0)
        stages[0].forward = [forward = stages[0].forward](const at::Tensor& x) {
          return forward(x).to(at::kLong);
        };
    });
    rank.step();
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("stage 0 made Long, which has no gradient"), std::string::npos) << error;
}

TEST(PipelineFaults, RefusesWhatDoesNotFit) {
  const PipelineRun run{.pp = 2};
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, run);
    test::expect_refusal([&] { rank.step(47); }, {"47 rows", "8 micro-batches"});
    test::expect_refusal([&] { rank.pipeline->step({}); }, {"0 optimizers for 1 stages"});
    test::expect_refusal([&] { rank.pipeline->clip_grad_norm(0.0); }, {"max_norm is 0"});
    const auto make = [&](const plan::Schedule& schedule, std::vector<parallel::Stage> stages,
                          const parallel::PipelineOptions& options = {}) {
      parallel::Pipeline(schedule, std::move(stages), test::squared_error, rank.mesh, options);
    };
    test::expect_refusal(
        [&] {
          make(plan::make_schedule(ScheduleName::k1F1B, {4, 8}), {});
        },
        {"1f1b has 4 ranks", "gives 2 to pp", "parallel.pp=4"});
    test::expect_refusal([&] { make(rank.schedule, {}); }, {"was given stages ,", "of the 2 stages"});
    test::expect_refusal([&] { make(plan::from_csv("0F0,0B0\n1F0", plan::Placement::kLoop, "mine"), {}); },
                         {"never runs 1I0"});
  });
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    // Two data-parallel ranks are not a pipeline of two.
    const comm::Mesh mesh = test::mesh_of(world);
    test::expect_refusal(
        [&] {
          parallel::Pipeline(plan::make_schedule(ScheduleName::k1F1B, {2, 8}), {}, test::squared_error, mesh);
        },
        {"1 to pp and 2 to data parallelism"});
  });
}

TEST(PipelineFaults, RanksWithDifferentSchedulesSaySo) {
  const auto errors = errors_of({.pp = 2}, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, {.schedule = world->rank() == 0 ? ScheduleName::k1F1B : ScheduleName::kGpipe, .pp = 2});
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("rank 1 was given another schedule"), std::string::npos) << error;
}

TEST(PipelineFaults, APipelineDoesNotRepeatWhatTheOneBeforeHasSaid) {
  const PipelineRun run{.pp = 2};
  std::vector<std::string> errors(2);
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    for (const int64_t fails : {0, 1}) {
      Rank rank(world, run, [&](std::vector<parallel::Stage>& stages) {
        if (stages[0].index == fails)
          stages[0].forward = [fails](const at::Tensor&) -> at::Tensor {
            throw std::runtime_error(fmt::format("failure {}", fails));
          };
      });
      try {
        rank.step();
      } catch (const Error& error) {
        errors[static_cast<size_t>(world->rank())] = error.what();
      }
    }
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("failure 1"), std::string::npos) << error;
    EXPECT_EQ(error.find("failure 0"), std::string::npos) << error;
  }
}

TEST(PipelineFaults, AStepWithoutGradientsIsRefusedAndTheNextOneRuns) {
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, {.pp = 2});
    {
      const at::NoGradGuard no_grad;
      test::expect_refusal([&] { rank.step(); }, {"gradients are off", "NoGradGuard"});
    }
    rank.step();
  });
}

TEST(PipelineFaults, RefusesALastStageWithoutLoss) {
  const PipelineRun run{.pp = 1};
  test::run_ranks(1, [&](const std::shared_ptr<comm::World>& world) {
    const plan::Schedule schedule = test::schedule_of(run);
    std::vector<parallel::Stage> stages;
    const auto modules = test::stages_of(schedule, 0, run, stages);
    test::expect_refusal([&] { parallel::Pipeline(schedule, stages, {}, test::mesh_of(world, run)); },
                         {"the last stage has no loss function"});
  });
}

TEST(PipelineFaults, RefusesATieThatDoesNotExist) {
  const PipelineRun run{.pp = 1};
  test::run_ranks(1, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = test::mesh_of(world, run);
    const plan::Schedule schedule = plan::make_schedule(ScheduleName::kInterleaved1F1B, {1, 4, 2});
    std::vector<parallel::Stage> stages;
    const auto modules = test::stages_of(schedule, 0, run, stages);
    parallel::PipelineOptions options;
    options.tied = {{.stage = 0, .name = "embedding", .other_stage = 1, .other_name = "head"}};
    test::expect_refusal([&] { parallel::Pipeline(schedule, stages, test::squared_error, mesh, options); },
                         {"stage 0 has no parameter embedding"});
    options.tied = {{.stage = 0, .name = "block00.b1", .other_stage = 1, .other_name = "head"}};
    test::expect_refusal([&] { parallel::Pipeline(schedule, stages, test::squared_error, mesh, options); },
                         {"block00.b1 of stage 0 has 10 elements", "head of stage 1", "100"});
  });
}

/// One rank alone sees a name that is wrong, and its partner would wait for it.
TEST(PipelineFaults, WhatIsWrongWithATieAllRanksSay) {
  const PipelineRun run{.pp = 3};
  const plan::Schedule schedule = test::schedule_of(run);
  struct Case {
    parallel::TiedParameter tie;
    std::string words;
  };
  const Case cases[] = {
      {{.stage = 0, .name = "embed", .other_stage = 3, .other_name = "head"}, "numbered from 0"},
      {{.stage = 0, .name = "embed", .other_stage = -1, .other_name = "head"}, "numbered from 0"},
      {{.stage = 0, .name = "embed", .other_stage = 2, .other_name = "nothing"}, "no parameter nothing"},
      {{.stage = 0, .name = "block00.b1", .other_stage = 2, .other_name = "head"}, "block00.b1 of stage 0"}};
  for (const Case& of : cases) {
    test::run_ranks(3, [&](const std::shared_ptr<comm::World>& world) {
      std::vector<parallel::Stage> stages;
      const auto modules = test::stages_of(schedule, world->rank(), run, stages);
      parallel::PipelineOptions options;
      options.tied = {of.tie};
      const comm::Mesh mesh = test::mesh_of(world, run);
      test::expect_refusal([&] { parallel::Pipeline(schedule, stages, test::squared_error, mesh, options); },
                           {of.words});
    });
  }
}

/// A rank with stages that are not its own would leave the others waiting.
TEST(PipelineFaults, StagesThatAreNotARanksOwnAllRanksRefuse) {
  const PipelineRun run{.pp = 2};
  const plan::Schedule schedule = test::schedule_of(run);
  test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    std::vector<parallel::Stage> stages;
    const auto modules = test::stages_of(schedule, 0, run, stages);
    const comm::Mesh mesh = test::mesh_of(world, run);
    test::expect_refusal([&] { parallel::Pipeline(schedule, stages, test::squared_error, mesh); },
                         {"rank 1 was given stages 0"});
  });
}

/// Whoever has one copy alone cannot see the other one; whoever has both can, and hosts agree on steps or
/// not.
TEST(PipelineFaults, AFrozenCopyOfAParameterThatIsTrainedElsewhereIsRefusedByAllRanks) {
  for (const ScheduleName name : {ScheduleName::k1F1B, ScheduleName::kZbV}) {
    for (const bool agrees : {true, false}) {
      if (!agrees && name == ScheduleName::k1F1B) continue;
      const PipelineRun run{.schedule = name, .pp = 2, .dp = 2, .micro_batches = 4, .tied = true};
      const plan::Schedule schedule = test::schedule_of(run);
      std::atomic<int64_t> refused = 0;
      test::run_ranks(4, [&](const std::shared_ptr<comm::World>& world) {
        const comm::Mesh mesh = test::mesh_of(world, run);
        std::vector<parallel::Stage> stages;
        const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
        parallel::PipelineOptions options = test::options_of(run, schedule);
        options.agrees_each_step = agrees;
        parallel::Pipeline pipeline(schedule, stages, test::squared_error, mesh, options);
        const auto step = [&] {
          pipeline.forward_backward(test::batch(3000, 0).chunk(2)[0], test::batch(4000, 0).chunk(2)[0]);
          pipeline.skip_step();
        };
        step();
        for (const auto& module : modules) {
          if (module->head.defined()) module->head.requires_grad_(false);
        }
        try {
          step();
        } catch (const Error& error) {
          ++refused;
          const std::string text = error.what();
          for (const char* const word : {"head of stage", "is frozen", "embed of stage 0", "requires_grad"})
            EXPECT_NE(text.find(word), std::string::npos) << word << " in: " << text;
        }
        if (!agrees) return;
        for (const auto& module : modules) {
          if (module->head.defined()) module->head.requires_grad_(true);
        }
        step();
      });
      EXPECT_EQ(refused, 4) << plan::name(name);
    }
  }
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
    const auto sends = std::ranges::count(rank.pipeline->program(), plan::StageAction::Kind::kSend,
                                          &plan::StageAction::kind);
    const int64_t message = test::kRows / run.micro_batches * test::Net::kWidth * 4;
    rank.pipeline->flush();
    EXPECT_EQ(rank.pipeline->sent_bytes() - first, sends * message);
    int64_t buffers = 0;
    for (const auto& [pool, count] : plan::receive_buffers(rank.pipeline->program())) buffers += count;
    EXPECT_EQ(rank.pipeline->buffer_bytes(), buffers * message);
  });
}

}  // namespace
}  // namespace trireme
