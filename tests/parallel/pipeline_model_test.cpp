// Language models in pipelines: units cut into stages, backward passes in two halves, tied embeddings.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "tests/parallel/layouts.h"
#include "tests/parallel/pipeline_net.h"
#include "tests/support/tiny_training.h"

namespace trireme {
namespace {

using plan::ScheduleName;

std::string as_one_word(std::string name) {
  std::ranges::replace(name, '.', '_');
  return name;
}

struct ModelRun {
  plan::ModelConfig config;
  ScheduleName schedule = ScheduleName::k1F1B;
  int64_t chunks = 1, dp = 1;
  std::string policy = {};  ///< of engines with the model's units; empty: the pipeline makes them
  at::ScalarType compute = at::kFloat;
  static constexpr int64_t kPp = 2, kMicroBatches = 4, kRows = 8, kSteps = 5;
};

/// Units [first, last) of a model, with their parameters and no others.
struct ModelStage : torch::nn::Module {
  ModelStage(const plan::ModelConfig& model_config, size_t first_unit, size_t last_unit)
      : config(model_config), model(nn::build(config)), first(first_unit), last(last_unit) {
    nn::InitialWeights(config, 11).fill(*model);
    for (const auto& entry : model->named_parameters()) {
      if (has(entry.key())) register_parameter(as_one_word(entry.key()), entry.value());
    }
  }
  bool is_last() const { return last == static_cast<size_t>(config.n_layers) + 2; }
  at::Tensor forward(const at::Tensor& x) const {
    return is_last() ? x
                     : model->run(std::span<const nn::Unit>(model->units()).subspan(first, last - first), x);
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& targets) const {
    return model->run(std::span<const nn::Unit>(model->units(nn::LossTarget{targets})).subspan(first), x);
  }
  /// As train/parts makes one, with the units of this stage.
  std::shared_ptr<parallel::DataParallel> engine(const comm::Mesh& mesh, const ModelRun& run) {
    std::vector<plan::UnitSpec> units;
    std::map<std::string, std::string> names;
    for (const plan::UnitSpec& unit : plan::describe(config, 8).units) {
      plan::UnitSpec& mine = units.emplace_back(plan::UnitSpec{unit.name, {}});
      for (plan::ParamSpec param : unit.params) {
        if (!has(param.name)) continue;
        names[as_one_word(param.name)] = param.name;
        param.name = as_one_word(param.name);
        mine.params.push_back(param);
      }
      if (mine.params.empty() && units.size() > 1) units.pop_back();
    }
    const nn::InitialWeights initial(config, 11);
    auto made = std::make_shared<parallel::DataParallel>(
        *this, units, mesh,
        parallel::Options{
            .policy = plan::find_policy(run.policy), .compute = run.compute, .reduce = run.compute},
        [initial, names](const std::string& name, int64_t from, at::Tensor& out) {
          initial(names.at(name), from, out);
        });
    train::connect(*model, *made);
    return made;
  }

 private:
  bool has(const std::string& name) const {
    const auto units = plan::describe(config, 8).units;
    const bool is_norm = name.starts_with("transformer.ln_f") || name.starts_with("model.norm");
    if (is_norm || name == "lm_head.weight") return is_last();
    const bool is_embedding =
        name.find("wte") != std::string::npos || name.find("embed") != std::string::npos;
    if (is_embedding && config.tie_embeddings && is_last()) return true;
    for (size_t unit = first; unit < std::min(last, units.size()); ++unit) {
      if (std::ranges::find(units[unit].params, name, &plan::ParamSpec::name) != units[unit].params.end())
        return true;
    }
    return false;
  }

  plan::ModelConfig config;
  std::shared_ptr<nn::LanguageModel> model;
  size_t first, last;
};

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

parallel::PipelineOptions options_of(const ModelRun& run, const plan::Schedule& schedule) {
  parallel::PipelineOptions options;
  options.data_parallel = {.compute = run.compute, .reduce = run.compute};
  if (run.config.tie_embeddings) {
    const bool gpt2 = run.config.family == plan::ModelFamily::kGpt2;
    const std::string name = gpt2 ? "transformer_wte_weight" : "model_embed_tokens_weight";
    options.tied = {{.stage = 0, .name = name, .other_stage = schedule.stages - 1, .other_name = name}};
  }
  return options;
}

test::PipelineOutcome train(const ModelRun& run) {
  test::PipelineOutcome outcome;
  std::mutex mutex;
  const plan::Schedule schedule =
      plan::make_schedule(run.schedule, {ModelRun::kPp, ModelRun::kMicroBatches, run.chunks});
  const auto units = static_cast<size_t>(run.config.n_layers) + 2;
  test::run_ranks(ModelRun::kPp * run.dp, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = test::mesh_of(world, {.pp = ModelRun::kPp});
    const comm::Mesh engine_mesh = parallel::stage_mesh(schedule, mesh);
    std::vector<parallel::Stage> stages;
    std::shared_ptr<ModelStage> last;
    for (const int64_t stage : schedule.stages_of(mesh.pp_rank)) {
      const auto cut = [&](int64_t i) {
        return static_cast<size_t>(i) * units / static_cast<size_t>(schedule.stages);
      };
      const auto module = std::make_shared<ModelStage>(run.config, cut(stage), cut(stage + 1));
      stages.push_back(parallel::make_stage(stage, module));
      if (!run.policy.empty()) stages.back().engine = module->engine(engine_mesh, run);
      if (stage + 1 == schedule.stages) last = module;
    }
    const auto loss = [&](const at::Tensor& x, const at::Tensor& targets) { return last->loss(x, targets); };
    parallel::Pipeline pipeline(schedule, stages, loss, mesh, options_of(run, schedule));
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

test::PipelineOutcome train_unpipelined(const ModelRun& run) {
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
  for (const auto& entry : model->named_parameters())
    outcome.weights[as_one_word(entry.key())] = entry.value().detach();
  return outcome;
}

void expect_near(const test::PipelineOutcome& got, const test::PipelineOutcome& wanted,
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
  const test::PipelineOutcome one_piece = train_unpipelined(run);
  const test::PipelineOutcome first = train(run);
  for (const ScheduleName schedule : plan::all_values<ScheduleName>()) {
    run.schedule = schedule;
    run.chunks = schedule == ScheduleName::kInterleaved1F1B || schedule == ScheduleName::kInterleavedZb ||
                         schedule == ScheduleName::kLoopedBfs
                     ? 2
                     : 1;
    const test::PipelineOutcome outcome = train(run);
    expect_near(outcome, one_piece, std::string(plan::name(schedule)));
    if (schedule == ScheduleName::kLoopedBfs || schedule == ScheduleName::kDualPipe) continue;
    test::expect_equal(outcome.weights, first.weights, std::string(plan::name(schedule)));
  }
}

INSTANTIATE_TEST_SUITE_P(Families, PipelinedModel,
                         ::testing::Values(std::pair{plan::ModelFamily::kGpt2, true},
                                           std::pair{plan::ModelFamily::kLlama, false}),
                         [](const auto& named) {
                           return std::string(plan::name(named.param.first)) +
                                  (named.param.second ? "_tied" : "");
                         });

TEST(PipelinedModel, HalvesOfBackwardAddUpInBf16) {
  at::set_num_threads(1);
  ModelRun run{.config = model_of(plan::ModelFamily::kGpt2, true), .compute = at::kBFloat16};
  for (const char* policy : {"", "zero2"}) {
    run.policy = policy;
    run.schedule = ScheduleName::k1F1B;
    const test::PipelineOutcome whole = train(run);
    for (const ScheduleName schedule : {ScheduleName::kZbH1, ScheduleName::kZbV}) {
      run.schedule = schedule;
      test::expect_equal(train(run).weights, whole.weights, std::string(plan::name(schedule)));
    }
  }
}

TEST(PipelinedModel, HalvesOfBackwardGoWithEveryPolicy) {
  ModelRun run{.config = model_of(plan::ModelFamily::kLlama, true), .dp = 2};
  const test::PipelineOutcome one_piece = train_unpipelined(run);
  for (const ScheduleName schedule : {ScheduleName::kZbH1, ScheduleName::kZbV, ScheduleName::kDualPipe}) {
    for (const char* policy : {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"}) {
      run.schedule = schedule;
      run.policy = policy;
      expect_near(train(run), one_piece, fmt::format("{} with {}", plan::name(schedule), policy));
    }
  }
}

}  // namespace
}  // namespace trireme
