// How all ranks of a pipeline end when one of them fails, or when their stages or schedules do not fit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
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
    EXPECT_NE(
        error.find("stage 0 produced (3, 10) Float for micro-batch 0, but stage 1 received (6, 10) Float"),
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

TEST(PipelineFaults, RanksWithDifferentSchedulesSaySo) {
  const auto errors = errors_of({.pp = 2}, [&](const std::shared_ptr<comm::World>& world) {
    Rank rank(world, {.schedule = world->rank() == 0 ? ScheduleName::k1F1B : ScheduleName::kGpipe, .pp = 2});
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("rank 1 was given another schedule"), std::string::npos) << error;
}

}  // namespace
}  // namespace trireme
