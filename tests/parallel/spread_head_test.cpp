// A head that is spread over the ranks of a pipeline, of modules of one's own: the weights of the model in
// one piece, and how all ranks end when a part of the head fails.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "tests/parallel/layouts.h"
#include "tests/parallel/pipeline_net.h"
#include "tests/support/refusal.h"
#include "trireme/plan/spread_head.h"
#include "trireme/plan/stages.h"

namespace trireme {
namespace {

using plan::ScheduleName;
using test::BlockStage;
using test::PipelineRun;

/// Of the vocabulary; a head that is tied has as many as the embeddings have rows.
int64_t classes_of(bool tied) {
  return tied ? test::Net::kWidth : 21;
}
constexpr int64_t kClasses = 21;

/// Rows of the head's weight. Those of a tied one start with other values than the embeddings: the pipeline
/// makes them equal.
struct HeadRows : torch::nn::Module {
  HeadRows(int64_t from, int64_t end, int64_t classes = kClasses) : first(from) {
    weight = register_parameter(
        "rows", test::random(11, {classes, test::Net::kWidth}, 0.5).narrow(0, from, end - from).clone());
  }
  nn::VocabularyPart part(const at::Tensor& hidden, const at::Tensor& targets) const {
    if (fails_at >= 0 && calls++ == fails_at) throw DataError("a part that fails");
    return nn::vocabulary_part(hidden, weight, first, {.targets = targets});
  }
  int64_t first, fails_at = -1;
  mutable int64_t calls = 0;
  at::Tensor weight;
};

at::Tensor targets_of(int64_t step, int64_t classes = kClasses) {
  return test::random(5000 + static_cast<uint64_t>(step), {test::kRows})
      .mul(1000.0)
      .to(at::kLong)
      .remainder(classes);
}

plan::Schedule spread_schedule(const PipelineRun& run) {
  const plan::Schedule schedule = test::schedule_of(run);
  return plan::spread_head(schedule, plan::with_head_parts(schedule, {}, 2.0, 1.0, 0.0));
}

/// A rank of a pipeline, ready for steps.
struct SpreadRank {
  /// `width`: as share_rows() has it.
  SpreadRank(const std::shared_ptr<comm::World>& world, const PipelineRun& run, plan::Schedule made,
             int64_t fails_on = -1, int64_t width = 8)
      : mesh(test::mesh_of(world, run)),
        schedule(std::move(made)),
        rows(plan::share_rows(classes_of(run.tied), run.pp, width)) {
    for (const int64_t stage : schedule.stages_of(mesh.pp_rank)) {
      if (!schedule.is_head_part(stage)) {
        const auto cut = [&](int64_t i) { return i * test::kBlocks / schedule.stages; };
        blocks.push_back(std::make_shared<BlockStage>(cut(stage), cut(stage + 1), false, run.recompute));
        stages.push_back(parallel::make_stage(stage, blocks.back()));
        continue;
      }
      const auto part = static_cast<size_t>(mesh.pp_rank);
      head = std::make_shared<HeadRows>(rows[part], rows[part + 1], classes_of(run.tied));
      head->fails_at = mesh.pp_rank == fails_on ? 3 : -1;
      stages.push_back(
          {.index = stage, .module = head, .forward = {}, .part = [this](const auto& x, const auto& y) {
             return head->part(x, y);
           }});
    }
  }
  std::vector<parallel::TiedParameter> ties() const {
    std::vector<parallel::TiedParameter> made;
    for (size_t part = 0; part + 1 < rows.size(); ++part)
      made.push_back({.stage = 0,
                      .name = "embed",
                      .other_stage = schedule.stages + static_cast<int64_t>(part),
                      .other_name = "rows",
                      .first_row = rows[part]});
    return made;
  }
  parallel::Pipeline& make(const PipelineRun& run) {
    parallel::PipelineOptions options = test::options_of(run, schedule);
    if (run.tied) options.tied = ties();
    return make(options);
  }
  parallel::Pipeline& make(const parallel::PipelineOptions& options) {
    pipeline = std::make_unique<parallel::Pipeline>(schedule, stages, parallel::StageLoss(), mesh, options);
    return *pipeline;
  }
  void begin_step(const PipelineRun& run, int64_t step) const {
    for (const auto& block : blocks) block->begin_step(run, step);
    if (head && run.tied) head->weight.requires_grad_(!run.frozen_steps.contains(step));
  }
  at::Tensor mine(const at::Tensor& rows, int64_t dp) const {
    return rows.chunk(dp)[static_cast<size_t>(mesh.dp_rank)];
  }

  comm::Mesh mesh;
  plan::Schedule schedule;
  std::vector<int64_t> rows;  ///< of the head's weight, with which each part begins, and their number
  std::vector<std::shared_ptr<BlockStage>> blocks;
  std::shared_ptr<HeadRows> head;
  std::vector<parallel::Stage> stages;
  std::unique_ptr<parallel::Pipeline> pipeline;
};

test::PipelineOutcome train_spread(const PipelineRun& run) {
  test::PipelineOutcome outcome;
  std::mutex mutex;
  std::map<int64_t, at::Tensor> rows;
  test::run_ranks(run.pp * run.dp, [&](const std::shared_ptr<comm::World>& world) {
    SpreadRank rank(world, run, spread_schedule(run));
    parallel::Pipeline& pipeline = rank.make(run);
    const auto optimizers =
        pipeline.optimizers([](auto params) { return optim::build(test::descent(0.05), std::move(params)); });
    for (int64_t step = 0; step < test::kPipelineSteps; ++step) {
      rank.begin_step(run, step);
      const at::Tensor inputs = rank.mine(test::batch(3000, step), run.dp),
                       targets = rank.mine(targets_of(step, classes_of(run.tied)), run.dp);
      const double ahead =
          pipeline.evaluate(inputs.chunk(run.micro_batches), targets.chunk(run.micro_batches)).item<double>();
      const double loss = pipeline.forward_backward(inputs, targets).item<double>();
      EXPECT_NEAR(ahead, loss, 1e-6 * loss) << run.label();
      const double norm = pipeline.clip_grad_norm(1.0);
      pipeline.step(optimizers);
      if (world->rank() != 0) continue;
      outcome.losses.push_back(loss);
      outcome.norms.push_back(norm);
    }
    for (const auto& engine : pipeline.engines()) {
      const test::Weights weights = test::weights_of(*engine);
      const std::lock_guard lock(mutex);
      for (const auto& [name, weight] : weights)
        (name == "rows" ? rows[rank.mesh.pp_rank] : outcome.weights[name]) = weight;
    }
  });
  std::vector<at::Tensor> in_order;
  for (const auto& [rank, part] : rows) in_order.push_back(part);
  outcome.weights["rows"] = at::cat(in_order);
  const bool equal = !run.tied || at::equal(outcome.weights["rows"], outcome.weights["embed"]);
  EXPECT_TRUE(equal) << run.label() << ": copies";
  return outcome;
}

test::PipelineOutcome train_whole(const PipelineRun& run = {}) {
  BlockStage model(0, test::kBlocks, false, false);
  const HeadRows head(0, kClasses);
  const at::Tensor weight = run.tied ? model.embed : head.weight;
  test::PipelineOutcome outcome;
  for (int64_t step = 0; step < test::kPipelineSteps; ++step) {
    model.zero_grad();
    weight.mutable_grad() = at::Tensor();
    model.begin_step(run, step);
    const at::Tensor logits = at::matmul(model.run(test::batch(3000, step)), weight.t());
    const at::Tensor loss = at::cross_entropy_loss(logits, targets_of(step, classes_of(run.tied)));
    loss.backward();
    outcome.losses.push_back(loss.item<double>());
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> all;
    for (const at::Tensor& param : model.parameters())
      if (param.requires_grad()) all.push_back(param);
    if (!run.tied) all.push_back(weight);
    double squares = 0.0;
    for (const at::Tensor& param : all) squares += param.grad().to(at::kDouble).square().sum().item<double>();
    outcome.norms.push_back(std::sqrt(squares));
    for (const at::Tensor& param : all)
      param.sub_(param.grad() * (0.05 * optim::clip_factor(std::sqrt(squares), 1.0)));
  }
  outcome.weights = test::copies(test::parameters_of(model));
  outcome.weights["rows"] = weight.detach().clone();
  return outcome;
}

void expect_trained_alike(const test::PipelineOutcome& got, const test::PipelineOutcome& wanted,
                          const std::string& what) {
  ASSERT_EQ(got.weights.size(), wanted.weights.size()) << what;
  for (const auto& [name, weight] : wanted.weights) {
    const double size = weight.to(at::kDouble).norm().item<double>();
    EXPECT_LE((got.weights.at(name) - weight).to(at::kDouble).norm().item<double>(), 1e-6 * size)
        << what << ": " << name;
  }
  for (size_t step = 0; step < wanted.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], wanted.losses[step], 1e-6 * wanted.losses[step]) << what;
    EXPECT_NEAR(got.norms[step], wanted.norms[step], 4e-6 * wanted.norms[step]) << what;
  }
}

TEST(SpreadHead, TrainsAsInOnePieceUnderEverySchedule) {
  at::set_num_threads(1);
  for (const bool tied : {false, true}) {
    const test::PipelineOutcome wanted = train_whole({.tied = tied});
    for (const ScheduleName schedule : plan::all_values<ScheduleName>()) {
      if (schedule == ScheduleName::kDualPipe) continue;
      for (const int64_t pp : {2, 4}) {
        const int64_t chunks = plan::takes_chunks(schedule) ? 2 : 1;
        const PipelineRun run{.schedule = schedule, .pp = pp, .chunks = chunks, .tied = tied};
        expect_trained_alike(train_spread(run), wanted, run.label());
      }
    }
  }
}

TEST(SpreadHead, GoesWithEveryPolicy) {
  at::set_num_threads(1);
  for (const bool tied : {false, true}) {
    const test::PipelineOutcome wanted = train_whole({.tied = tied});
    for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
      for (const ScheduleName schedule : {ScheduleName::k1F1B, ScheduleName::kZbV}) {
        const PipelineRun run{.schedule = schedule, .dp = 2, .policy = policy, .tied = tied};
        expect_trained_alike(train_spread(run), wanted, run.label());
      }
    }
  }
}

/// Embeddings and rows together; nothing is summed meanwhile.
TEST(SpreadHead, ATiedOneIsFrozenAndThawed) {
  at::set_num_threads(1);
  for (const char* policy : {"ddp", "fsdp"}) {
    const PipelineRun run{.dp = 2, .policy = policy, .tied = true, .frozen_steps = {1, 2}};
    expect_trained_alike(train_spread(run), train_whole(run), run.label());
  }
}

/// Moments in few bits are rounded at random, by where an element is in its parameter: of rows by where it is
/// in the embeddings.
TEST(SpreadHead, TiedCopiesStayEqualToTheBit) {
  at::set_num_threads(1);
  for (const plan::OptimState state : plan::all_values<plan::OptimState>()) {
    for (const char* policy : {"ddp", "fsdp"}) {
      const PipelineRun run{.dp = 2, .policy = policy, .tied = true, .compute = at::kBFloat16};
      const plan::OptimConfig config{.state = state, .lr = 1e-2, .ema = 0.9};
      std::mutex mutex;
      std::map<int64_t, at::Tensor> rows, averages;
      at::Tensor embeddings, average;
      test::run_ranks(run.pp * run.dp, [&](const std::shared_ptr<comm::World>& world) {
        SpreadRank rank(world, run, spread_schedule(run), -1, /*width=*/test::Net::kWidth);
        parallel::Pipeline& pipeline = rank.make(run);
        const auto optimizers = pipeline.optimizers(
            [&](std::vector<optim::FlatParam> params) { return optim::build(config, std::move(params)); });
        for (int64_t step = 0; step < test::kPipelineSteps; ++step) {
          pipeline.forward_backward(rank.mine(test::batch(3000, step), run.dp).to(run.compute),
                                    rank.mine(targets_of(step, classes_of(true)), run.dp));
          pipeline.clip_grad_norm(1.0);
          pipeline.step(optimizers);
        }
        for (const bool averaged : {false, true}) {
          for (size_t i = 0; i < optimizers.size(); ++i) {
            const auto& engine = pipeline.engines()[i];
            if (averaged) engine->swap_averages(*optimizers[i]);
            const test::Weights weights = test::weights_of(*engine);
            const std::lock_guard lock(mutex);
            if (weights.contains("embed")) (averaged ? average : embeddings) = weights.at("embed");
            if (weights.contains("rows"))
              (averaged ? averages : rows)[rank.mesh.pp_rank] = weights.at("rows");
          }
        }
      });
      const std::string what = fmt::format("{}, {}", plan::name(state), policy);
      EXPECT_TRUE(at::equal(at::cat({rows.at(0), rows.at(1)}), embeddings)) << what;
      EXPECT_TRUE(at::equal(at::cat({averages.at(0), averages.at(1)}), average)) << what;
      EXPECT_FALSE(at::equal(average, embeddings)) << what;
    }
  }
}

TEST(SpreadHead, TiesAreRefusedWithHooksThatCompressByBuffer) {
  const PipelineRun run{.tied = true};
  const auto make = [&](plan::CommHook hook) {
    test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      SpreadRank rank(world, run, spread_schedule(run));
      parallel::PipelineOptions options;
      options.tied = rank.ties();
      options.data_parallel.hook.hook = hook;
      rank.make(options);
    });
  };
  test::expect_refusal([&] { make(plan::CommHook::kInt8); }, {"hook int8 with tied", "drift apart"});
  make(plan::CommHook::kFp16);
}

TEST(SpreadHead, AllRanksRefuseTiesThatDoNotFit) {
  const PipelineRun run{.tied = true};
  const auto make = [&](const std::function<void(std::vector<parallel::TiedParameter>&)>& change) {
    test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      SpreadRank rank(world, run, spread_schedule(run));
      parallel::PipelineOptions options;
      options.tied = rank.ties();
      change(options.tied);
      rank.make(options);
    });
  };
  test::expect_refusal([&] { make([](auto& ties) { ties[1].first_row = 6; }); },
                       {"embed of stage 0 has 10 rows, and rows of stage 3 is tied to those from 6 to 11"});
  test::expect_refusal([&] { make([](auto& ties) { ties[1].first_row = -1; }); }, {"from -1 to 4"});
  test::expect_refusal([&] { make([](auto& ties) { ties[1].first_row = 4; }); },
                       {"rows 0 to 5 of embed of stage 0 are tied to rows of stage 2", "4 to 9"});
  test::expect_refusal([&] { make([](auto& ties) { ties[1].first_row.reset(); }); },
                       {"100 elements", "50", "TiedParameter::first_row"});
  test::expect_refusal([&] { make([](auto& ties) { ties[1].name = "block00.b1"; }); },
                       {"a row of block00.b1 of stage 0 has 1 elements", "10"});
  test::expect_refusal([&] { make([](auto& ties) { ties[1].other_stage = 4; }); },
                       {"rows of stage 4", "4 stages"});
  test::expect_refusal(
      [&] {
        make([](auto& ties) {
          ties[1] = {.stage = 2, .name = "rows", .other_stage = 3, .other_name = "rows"};
        });
      },
      {"a copy would have two others"});
}

TEST(SpreadHead, AllRanksRefuseRowsThatAreFrozenAlone) {
  const PipelineRun run{.tied = true};
  test::expect_refusal(
      [&] {
        test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
          SpreadRank rank(world, run, spread_schedule(run));
          parallel::Pipeline& pipeline = rank.make(run);
          if (world->rank() == 1) rank.head->weight.requires_grad_(false);
          pipeline.forward_backward(test::batch(3000, 0), targets_of(0, classes_of(true)));
        });
      },
      {"rows of stage 3 on rank 1 is frozen", "embed of stage 0"});
}

TEST(SpreadHead, EveryRankNamesThePartThatHasThrown) {
  const PipelineRun run{.pp = 4};
  std::vector<std::string> errors(4);
  EXPECT_ANY_THROW(test::run_ranks(
      4,
      [&](const std::shared_ptr<comm::World>& world) {
        SpreadRank rank(world, run, spread_schedule(run), /*fails_on=*/1);
        try {
          rank.make(run).forward_backward(test::batch(3000, 0), targets_of(0));
        } catch (const std::exception& error) {
          errors[static_cast<size_t>(world->rank())] = error.what();
          throw;
        }
      },
      /*timeout_s=*/4.0));
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("stage 5 on rank 1 in 'forward 5F3'"), std::string::npos) << error;
    EXPECT_NE(error.find("a part that fails"), std::string::npos) << error;
  }
}

TEST(SpreadHead, RefusesWhatDoesNotFit) {
  const PipelineRun run{};
  const auto make = [&](const std::function<void(SpreadRank&)>& change, int64_t on) {
    test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      SpreadRank rank(world, run, spread_schedule(run));
      if (world->rank() == on) change(rank);
      rank.make(run).forward_backward(test::batch(3000, 0), targets_of(0));
    });
  };
  test::expect_refusal([&] { make([](SpreadRank& rank) { rank.stages.back().part = {}; }, 1); },
                       {"stage 3 has no function of a part of the head"});
  test::expect_refusal([&] { make([](SpreadRank& rank) { rank.stages.pop_back(); }, 0); },
                       {"rank 0 was given stages 0, but has 0, 2 of the 4 stages"});
  test::expect_refusal([&] { make([&](SpreadRank& rank) { rank.schedule = test::schedule_of(run); }, 1); },
                       {"rank 1 was given another schedule"});
}

TEST(SpreadHead, AllRanksRefuseToEvaluateATargetThatNoPartHas) {
  const PipelineRun run{.pp = 4};
  test::run_ranks(
      4,
      [&](const std::shared_ptr<comm::World>& world) {
        SpreadRank rank(world, run, spread_schedule(run));
        parallel::Pipeline& pipeline = rank.make(run);
        at::Tensor targets = targets_of(0).clone();
        targets[1] = kClasses;
        test::expect_refusal([&] { pipeline.evaluate({test::batch(3000, 0)}, {targets}); },
                             {"behind forward passes", "the target of row 1 is 21, which no part"});
      },
      /*timeout_s=*/4.0);
}

/// Another pipeline of the same job fails: what it waits for does not come, and it says why.
TEST(SpreadHead, OtherPipelinesSayWhyAnEvaluationHasFailed) {
  for (const bool spread : {true, false}) {
    const PipelineRun run{.dp = 2};
    std::vector<std::string> errors(4);
    EXPECT_ANY_THROW(test::run_ranks(
        4,
        [&](const std::shared_ptr<comm::World>& world) {
          SpreadRank rank(world, run, spread ? spread_schedule(run) : test::schedule_of(run));
          const auto loss = [](const at::Tensor& output, const at::Tensor& targets) {
            if (targets.max().item<int64_t>() == kClasses) throw DataError("a class that is not there");
            return output.sum();
          };
          parallel::Pipeline pipeline(rank.schedule, rank.stages, loss, rank.mesh,
                                      test::options_of(run, rank.schedule));
          at::Tensor targets = targets_of(0).clone();
          if (rank.mesh.dp_rank == 1) targets[1] = kClasses;
          try {
            pipeline.evaluate({test::batch(3000, 0)}, {targets});
          } catch (const std::exception& error) {
            errors[static_cast<size_t>(world->rank())] = error.what();
            throw;
          }
        },
        /*timeout_s=*/4.0));
    for (const std::string& error : errors) {
      EXPECT_NE(error.find(spread ? "the target of row 1 is 21" : "a class that is not there"),
                std::string::npos)
          << error;
    }
  }
}

/// Micro-batches of any number of rows, some of whose targets are ignored, and with sends that block.
TEST(SpreadHead, WeighsMicroBatchesByTheirTargets) {
  at::set_num_threads(1);
  constexpr int64_t kIgnored = -100;
  const std::vector<int64_t> rows = {5, 20, 3, 20};
  at::Tensor targets = targets_of(0).clone();
  targets.narrow(0, 3, 9).fill_(kIgnored);
  const auto inputs_of_parts = test::batch(3000, 0).split_with_sizes(rows),
             targets_of_parts = targets.split_with_sizes(rows);
  std::vector<double> weights;
  for (const at::Tensor& part : targets_of_parts) weights.push_back(part.ne(kIgnored).sum().item<double>());
  BlockStage whole(0, test::kBlocks, false, false);
  HeadRows whole_head(0, kClasses);
  const at::Tensor wanted = at::cross_entropy_loss(
      at::matmul(whole.run(test::batch(3000, 0)), whole_head.weight.t()), targets, {}, 1, kIgnored);
  wanted.backward();
  double squares = 0.0;
  for (const auto& params : {whole.parameters(), whole_head.parameters()}) {
    for (const at::Tensor& param : params)
      squares += param.grad().to(at::kDouble).square().sum().item<double>();
  }
  for (const ScheduleName name : plan::all_values<ScheduleName>()) {
    if (name == ScheduleName::kDualPipe) continue;
    const PipelineRun run{.schedule = name,
                          .chunks = plan::takes_chunks(name) ? 2 : 1,
                          .micro_batches = static_cast<int64_t>(rows.size())};
    test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      SpreadRank rank(world, run, spread_schedule(run));
      parallel::Pipeline& pipeline = rank.make(run);
      for (int repeat = 0; repeat < 3; ++repeat) {
        const at::Tensor loss = pipeline.forward_backward(inputs_of_parts, targets_of_parts, weights);
        EXPECT_NEAR(loss.item<double>(), wanted.item<double>(), 1e-6 * wanted.item<double>()) << run.label();
        EXPECT_NEAR(pipeline.grad_norm(), std::sqrt(squares), 1e-6 * std::sqrt(squares)) << run.label();
        pipeline.skip_step();
        const at::Tensor seen = pipeline.evaluate(inputs_of_parts, targets_of_parts, weights);
        EXPECT_NEAR(seen.item<double>(), wanted.item<double>(), 1e-6 * wanted.item<double>()) << run.label();
      }
    });
  }
}

TEST(SpreadHead, AllRanksNeedTargets) {
  const PipelineRun run{};
  test::expect_refusal(
      [&] {
        test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
          SpreadRank rank(world, run, spread_schedule(run));
          rank.make(run).forward_backward(test::batch(3000, 0),
                                          world->rank() == 0 ? at::Tensor() : targets_of(0));
        });
      },
      {"rank 0", "0 micro-batches of targets"});
  test::expect_refusal(
      [&] {
        test::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
          SpreadRank rank(world, run, spread_schedule(run));
          rank.make(run).forward_backward(
              test::batch(3000, 0), world->rank() == 0 ? targets_of(0).narrow(0, 0, 24) : targets_of(0));
        });
      },
      {"rank 0 was given 48 rows of inputs, and rank 0 24 of targets"});
}

}  // namespace
}  // namespace trireme
