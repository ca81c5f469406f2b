// What a pipeline refuses: all of its ranks do, and nobody waits for one that has.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/parallel/pipeline_rank.h"
#include "tests/support/refusal.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using plan::ScheduleName;
using test::PipelineRun;
using test::Rank;

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

/// Each rank of a model in two ways has inputs and targets.
TEST(PipelineFaults, OtherSamplesForTheOtherWayOfAModelAllRanksRefuse) {
  const PipelineRun run{.schedule = ScheduleName::kDualPipe, .pp = 2, .micro_batches = 4};
  for (const bool of_inputs : {true, false}) {
    test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      Rank rank(world, run);
      const int64_t few = world->rank() == 1 ? 4 : 8;
      test::expect_refusal(
          [&] {
            rank.pipeline->forward_backward(rows(3000, of_inputs ? few : 8), rows(4000, of_inputs ? 8 : few));
          },
          {of_inputs ? "rank 1 was given 4 rows of inputs, and rank 0 8 of targets"
                     : "rank 0 was given 8 rows of inputs, and rank 1 4 of targets"});
      rank.step(8);
    });
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

/// Other ranks have modules of their own for both stages, and would wait for this one.
TEST(PipelineFaults, OneModuleForTwoStagesAllRanksRefuse) {
  const PipelineRun run{.schedule = ScheduleName::kInterleaved1F1B, .pp = 2, .chunks = 2};
  const plan::Schedule schedule = test::schedule_of(run);
  for (const int64_t refusing : {0, 1}) {
    const auto began = std::chrono::steady_clock::now();
    test::run_ranks(
        2,
        [&](const std::shared_ptr<comm::World>& world) {
          const comm::Mesh mesh = test::mesh_of(world, run);
          std::vector<parallel::Stage> stages;
          const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
          ASSERT_EQ(stages.size(), 2u);
          if (world->rank() == refusing) stages[1].module = stages[0].module;
          test::expect_refusal([&] { parallel::Pipeline(schedule, stages, test::squared_error, mesh); },
                               {fmt::format("stages {} and {} of rank {} have one parameter", refusing,
                                            refusing + 2, refusing),
                                "PipelineOptions::tied"});
        },
        /*timeout_s=*/60.0);
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(20)) << "nobody waits in vain";
  }
}

/// Modules that the engine of one stage does not take; all have their parameters back for the next attempt.
TEST(PipelineFaults, AModuleThatOneRankCannotWrapAllRanksRefuse) {
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    const PipelineRun run{.pp = 2, .dp = 2, .policy = policy};
    const plan::Schedule schedule = test::schedule_of(run);
    test::run_ranks(
        4,
        [&](const std::shared_ptr<comm::World>& world) {
          const comm::Mesh mesh = test::mesh_of(world, run);
          std::vector<parallel::Stage> stages;
          const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
          const parallel::PipelineOptions options = test::options_of(run, schedule);
          at::Tensor kept;
          if (world->rank() == 3) kept = modules.front()->parameters().front().detach();
          test::expect_refusal(
              [&] { parallel::Pipeline(schedule, stages, test::squared_error, mesh, options); },
              {"another tensor has the memory of parameter"});
          kept = at::Tensor();
          parallel::Pipeline pipeline(schedule, stages, test::squared_error, mesh, options);
          pipeline.forward_backward(rows(3000, 8), rows(4000, 8));
          pipeline.skip_step();
        },
        /*timeout_s=*/60.0);
  }
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

/// Whoever has an engine broadcasts no values, and the rank of the other copy would wait for them.
TEST(PipelineFaults, AnEngineForOneOfTwoTiedCopiesAllRanksRefuse) {
  const PipelineRun run{.pp = 3, .tied = true};
  const plan::Schedule schedule = test::schedule_of(run);
  for (const int64_t stage : {0, 2}) {
    test::run_ranks(3, [&](const std::shared_ptr<comm::World>& world) {
      const comm::Mesh mesh = test::mesh_of(world, run);
      std::vector<parallel::Stage> stages;
      const auto modules = test::stages_of(schedule, mesh.pp_rank, run, stages);
      if (mesh.pp_rank == stage) stages[0].engine = parallel::data_parallel(*stages[0].module, mesh);
      test::expect_refusal(
          [&] {
            parallel::Pipeline(schedule, stages, test::squared_error, mesh, test::options_of(run, schedule));
          },
          {"embed of stage 0 is tied to head of stage 2", "Stage::engine"});
    });
  }
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

}  // namespace
}  // namespace trireme
