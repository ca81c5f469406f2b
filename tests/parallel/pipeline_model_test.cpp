// Language models in pipelines: units cut into stages, backward passes in two halves, tied embeddings.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "tests/parallel/layouts.h"
#include "tests/parallel/pipeline_net.h"
#include "tests/support/tiny_training.h"
#include "trireme/train/model_stage.h"

namespace trireme {
namespace {

using plan::ScheduleName;

struct ModelRun {
  plan::ModelConfig config;
  ScheduleName schedule = ScheduleName::k1F1B;
  int64_t chunks = 1, dp = 1;
  std::string policy = {};  ///< of engines with the model's units; empty: the pipeline makes them
  at::ScalarType compute = at::kFloat;
  bool halves = false;  ///< stages begin and end inside blocks
  plan::Recompute recompute = plan::Recompute::kNone;
  static constexpr int64_t kPp = 2, kMicroBatches = 4, kRows = 8, kSteps = 5;
};

nn::InitialWeights initial_of(const ModelRun& run) {
  return {run.config, 11};
}

parallel::Options engine_options(const ModelRun& run) {
  return {.policy = plan::find_policy(run.policy), .compute = run.compute, .reduce = run.compute};
}

plan::ModelConfig model_of(plan::ModelFamily family, bool tied) {
  plan::ModelConfig config;
  config.family = family;
  config.n_layers = 6;
  config.d_model = 24;
  config.n_heads = 4;
  config.d_ff = 56;
  config.vocab_size = 37;
  config.tie_embeddings = tied;
  return plan::complete(config, 8);
}

std::pair<at::Tensor, at::Tensor> tokens_of(int64_t step) {
  const at::Tensor tokens = test::tiny_tokens(step, ModelRun::kRows, 37);
  return {tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8).contiguous()};
}

/// The part of the model, in units or in halves of blocks, with which each stage begins.
plan::UnitRange range_of(const ModelRun& run, int64_t stage, int64_t stages) {
  if (run.halves) {
    plan::StageSplit split;
    split.of_halves = true;
    const int64_t parts = 2 * run.config.n_layers + 1;
    for (int64_t i = 0; i <= stages; ++i)
      split.first.push_back((i * parts + (i < stages ? stages / 2 : 0)) / stages);
    split.first.front() = 0;
    return plan::units_of_stage(split, stage);
  }
  const int64_t units = run.config.n_layers + 2;
  return {stage * units / stages, (stage + 1) * units / stages};
}

parallel::PipelineOptions model_options(const ModelRun& run, const plan::Schedule& schedule) {
  parallel::PipelineOptions options;
  options.data_parallel = {.compute = run.compute, .reduce = run.compute};
  if (run.config.tie_embeddings) {
    const std::string name = *train::ModelStage::tied_parameter(run.config);
    options.tied = {{.stage = 0, .name = name, .other_stage = schedule.stages - 1, .other_name = name}};
  }
  return options;
}

test::PipelineOutcome train_model(const ModelRun& run) {
  test::PipelineOutcome outcome;
  std::mutex mutex;
  const plan::Schedule schedule =
      plan::make_schedule(run.schedule, {ModelRun::kPp, ModelRun::kMicroBatches, run.chunks});
  test::run_ranks(ModelRun::kPp * run.dp, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = test::mesh_of(world, {.pp = ModelRun::kPp});
    const comm::Mesh engine_mesh = parallel::stage_mesh(schedule, mesh);
    std::vector<parallel::Stage> stages;
    std::shared_ptr<train::ModelStage> last;
    for (const int64_t stage : schedule.stages_of(mesh.pp_rank)) {
      const auto module =
          std::make_shared<train::ModelStage>(run.config, range_of(run, stage, schedule.stages));
      module->fill(initial_of(run));
      stages.push_back(parallel::make_stage(stage, module));
      if (!run.policy.empty())
        stages.back().engine = module->make_engine(engine_mesh, engine_options(run), initial_of(run),
                                                   {.recompute = run.recompute});
      if (stage + 1 == schedule.stages) last = module;
    }
    const auto loss = [&](const at::Tensor& x, const at::Tensor& targets) {
      return last->loss(x, {.targets = targets});
    };
    parallel::Pipeline pipeline(schedule, stages, loss, mesh, model_options(run, schedule));
    const auto optimizers =
        pipeline.optimizers([](auto params) { return optim::build(test::descent(0.5), params); });
    for (int64_t step = 0; step < ModelRun::kSteps; ++step) {
      const auto [inputs, targets] = tokens_of(step);
      const auto place = static_cast<size_t>(mesh.dp_rank);
      const at::Tensor value =
          pipeline.forward_backward(inputs.chunk(run.dp)[place], targets.chunk(run.dp)[place]);
      const double norm = pipeline.clip_grad_norm(1.0);
      pipeline.step(optimizers);
      if (world->rank() != 0) continue;
      outcome.losses.push_back(value.item<double>());
      outcome.norms.push_back(norm);
    }
    for (const auto& engine : pipeline.engines()) {
      const test::Weights weights = test::weights_of(*engine);
      const std::lock_guard lock(mutex);
      for (const auto& [name, weight] : weights) {
        const auto [place, is_new] = outcome.weights.emplace(name, weight);
        EXPECT_TRUE(is_new || at::equal(place->second, weight)) << "copies of " << name;
      }
    }
  });
  return outcome;
}

test::PipelineOutcome train_in_one_piece(const ModelRun& run) {
  const auto model = nn::build(run.config);
  nn::InitialWeights(run.config, 11).fill(*model);
  test::PipelineOutcome outcome;
  const int64_t parts = ModelRun::kMicroBatches * run.dp;
  for (int64_t step = 0; step < ModelRun::kSteps; ++step) {
    model->zero_grad();
    const auto [inputs, targets] = tokens_of(step);
    double sum = 0.0;
    for (int64_t i = 0; i < parts; ++i) {
      const auto place = static_cast<size_t>(i);
      const at::Tensor loss =
          model->loss(inputs.chunk(parts)[place], targets.chunk(parts)[place].contiguous());
      (loss / static_cast<double>(parts)).backward();
      sum += loss.item<double>() / static_cast<double>(parts);
    }
    outcome.losses.push_back(sum);
    const at::NoGradGuard no_grad;
    double squares = 0.0;
    for (const auto& param : model->parameters())
      squares += param.grad().to(at::kDouble).square().sum().item<double>();
    outcome.norms.push_back(std::sqrt(squares));
    for (at::Tensor param : model->parameters())
      param.sub_(param.grad() * (0.5 * optim::clip_factor(std::sqrt(squares), 1.0)));
  }
  for (const auto& entry : model->named_parameters()) outcome.weights[entry.key()] = entry.value().detach();
  return outcome;
}

void expect_outcome_near(const test::PipelineOutcome& got, const test::PipelineOutcome& wanted,
                         const std::string& what) {
  double difference = 0.0, size = 0.0;
  ASSERT_EQ(got.weights.size(), wanted.weights.size()) << what;
  for (const auto& [name, weight] : wanted.weights) {
    difference += (got.weights.at(name) - weight).to(at::kDouble).square().sum().item<double>();
    size += weight.to(at::kDouble).square().sum().item<double>();
  }
  EXPECT_LE(std::sqrt(difference / size), 1e-6) << what;
  for (size_t step = 0; step < wanted.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], wanted.losses[step], 1e-6 * wanted.losses[step]) << what;
    EXPECT_NEAR(got.norms[step], wanted.norms[step], 2e-6 * wanted.norms[step]) << what;
  }
}

class PipelinedModel : public ::testing::TestWithParam<std::pair<plan::ModelFamily, bool>> {};

TEST_P(PipelinedModel, TrainsAsInOnePieceUnderEverySchedule) {
  at::set_num_threads(1);
  ModelRun run{.config = model_of(GetParam().first, GetParam().second)};
  const test::PipelineOutcome one_piece = train_in_one_piece(run);
  const test::PipelineOutcome first = train_model(run);
  for (const ScheduleName schedule : plan::all_values<ScheduleName>()) {
    run.schedule = schedule;
    run.chunks = schedule == ScheduleName::kInterleaved1F1B || schedule == ScheduleName::kInterleavedZb ||
                         schedule == ScheduleName::kLoopedBfs
                     ? 2
                     : 1;
    const test::PipelineOutcome outcome = train_model(run);
    expect_outcome_near(outcome, one_piece, std::string(plan::name(schedule)));
    if (schedule == ScheduleName::kLoopedBfs || schedule == ScheduleName::kDualPipe) continue;
    test::expect_equal(outcome.weights, first.weights, std::string(plan::name(schedule)));
    run.halves = true;
    test::expect_equal(train_model(run).weights, first.weights,
                       fmt::format("{} cut inside blocks", plan::name(schedule)));
    run.halves = false;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, PipelinedModel,
                         ::testing::Values(std::pair{plan::ModelFamily::kGpt2, true},
                                           std::pair{plan::ModelFamily::kLlama, false}),
                         [](const auto& named) {
                           return std::string(plan::name(named.param.first)) +
                                  (named.param.second ? "_tied" : "");
                         });

TEST(PipelinedModel, HalvesOfBlocksRecomputeAndAreSharded) {
  ModelRun run{.config = model_of(plan::ModelFamily::kLlama, false), .schedule = ScheduleName::kZbV, .dp = 2};
  for (const plan::Recompute recompute : {plan::Recompute::kCheap, plan::Recompute::kBlock}) {
    for (const char* policy : {"zero2", "fsdp"}) {
      run.policy = policy;
      run.recompute = plan::Recompute::kNone;
      run.halves = false;
      const test::PipelineOutcome whole = train_model(run);
      run.recompute = recompute;
      run.halves = true;
      test::expect_equal(train_model(run).weights, whole.weights,
                         fmt::format("{} with {}", plan::name(recompute), policy));
    }
  }
}

TEST(PipelinedModel, HalvesOfBackwardAddUpInBf16) {
  at::set_num_threads(1);
  ModelRun run{.config = model_of(plan::ModelFamily::kGpt2, true), .compute = at::kBFloat16};
  for (const char* policy : {"", "zero2"}) {
    run.policy = policy;
    run.schedule = ScheduleName::k1F1B;
    const test::PipelineOutcome whole = train_model(run);
    for (const ScheduleName schedule : {ScheduleName::kZbH1, ScheduleName::kZbV}) {
      run.schedule = schedule;
      test::expect_equal(train_model(run).weights, whole.weights, std::string(plan::name(schedule)));
    }
  }
}

TEST(PipelinedModel, HalvesOfBackwardGoWithEveryPolicy) {
  ModelRun run{.config = model_of(plan::ModelFamily::kLlama, true), .dp = 2};
  const test::PipelineOutcome one_piece = train_in_one_piece(run);
  for (const ScheduleName schedule : {ScheduleName::kZbH1, ScheduleName::kZbV, ScheduleName::kDualPipe}) {
    for (const char* policy : {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"}) {
      run.schedule = schedule;
      run.policy = policy;
      expect_outcome_near(train_model(run), one_piece,
                          fmt::format("{} with {}", plan::name(schedule), policy));
    }
  }
}

}  // namespace
}  // namespace trireme
