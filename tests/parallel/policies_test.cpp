// Laws 1, 2 and 5: initial weights do not depend on the layout; all policies give the same bits; many ranks
// equal one; bytes on the wire follow the formula of each policy.
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tests/support/engine_on_model.h"
#include "tests/support/planned_step.h"
#include "tests/support/tiny_training.h"
#include "trireme/base/error.h"
#include "trireme/nn/init.h"
#include "trireme/parallel/storage.h"
#include "trireme/parallel/wrap.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/optimizer.h"
#include "trireme/plan/policy.h"

namespace trireme {
namespace {

using test::TinyOutcome;
using test::TinyRun;
using test::train_tiny;

/// Every row of the table on `ranks` ranks: hybrid ones where two replicas divide them.
std::vector<TinyRun> all_policies(const TinyRun& base) {
  std::vector<TinyRun> runs;
  for (const plan::Policy& policy : plan::policies()) {
    if (policy.hybrid && base.ranks % 2 != 0) continue;
    TinyRun run = base;
    run.policy = policy.label();
    run.replicas = policy.hybrid ? 2 : 1;
    runs.push_back(run);
  }
  return runs;
}

/// Relative, over all weights.
double distance(const TinyOutcome& got, const TinyOutcome& wanted) {
  double difference = 0.0, size = 0.0;
  for (const auto& [name, weight] : wanted.weights) {
    difference += (got.weights.at(name) - weight).square().sum().item<double>();
    size += weight.square().sum().item<double>();
  }
  return std::sqrt(difference / size);
}

TEST(Law1, InitialWeightsAreTheSameForAnyLayout) {
  for (const plan::ModelFamily family : {plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama}) {
    const std::string one = train_tiny({.policy = "ddp", .family = family, .ranks = 1, .steps = 0}).digest;
    for (int64_t ranks = 1; ranks <= 4; ++ranks) {
      for (const TinyRun& run : all_policies({.family = family, .ranks = ranks, .steps = 0})) {
        EXPECT_EQ(train_tiny(run).digest, one) << run.policy << " on " << ranks;
      }
    }
  }
}

struct Setting {
  int64_t ranks;
  at::ScalarType compute;
  int64_t accumulation;
  double grad_clip;
  parallel::ReduceWhen reduce_when = parallel::ReduceWhen::kOncePerStep;
  std::optional<at::ScalarType> reduce = {};
  plan::SumDtype accumulate = plan::SumDtype::kFp32;
  plan::OptimState state = plan::OptimState::kFp32;
};

constexpr auto kOnce = parallel::ReduceWhen::kOncePerStep;
constexpr auto kEvery = parallel::ReduceWhen::kEveryMicroBatch;
constexpr auto kAsComputed = plan::SumDtype::kCompute;

class Law2 : public ::testing::TestWithParam<Setting> {};

TEST_P(Law2, AllPoliciesGiveBitIdenticalWeightsAfter20Steps) {
  const Setting setting = GetParam();
  for (const plan::ModelFamily family : {plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama}) {
    TinyRun run{.policy = "ddp",
                .family = family,
                .ranks = setting.ranks,
                .accumulation = setting.accumulation,
                .grad_clip = setting.grad_clip,
                .compute = setting.compute,
                .reduce = setting.reduce,
                .accumulate = setting.accumulate,
                .state = setting.state,
                .reduce_when = setting.reduce_when};
    const TinyOutcome reference = train_tiny(run);
    EXPECT_LT(reference.losses.back(), 0.8 * reference.losses.front())
        << "the runs must have learnt something";
    for (const TinyRun& other : all_policies(run)) {
      EXPECT_EQ(train_tiny(other).digest, reference.digest) << plan::name(family) << " " << other.policy;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Policies, Law2,
    ::testing::Values(
        Setting{2, at::kFloat, 1, 1.0}, Setting{3, at::kFloat, 1, 1.0}, Setting{4, at::kFloat, 1, 1.0},
        Setting{2, at::kFloat, 3, 0.0}, Setting{2, at::kBFloat16, 1, 1.0}, Setting{4, at::kBFloat16, 3, 1.0},
        Setting{4, at::kFloat, 3, 1.0, kEvery}, Setting{2, at::kBFloat16, 3, 0.0, kEvery},
        Setting{4, at::kFloat, 1, 1.0, kOnce, at::kBFloat16},
        Setting{4, at::kFloat, 3, 1.0, kEvery, at::kBFloat16},
        Setting{4, at::kBFloat16, 3, 1.0, kOnce, at::kFloat},
        Setting{4, at::kBFloat16, 3, 1.0, kOnce, {}, kAsComputed},
        Setting{3, at::kFloat, 1, 1.0, kOnce, {}, plan::SumDtype::kFp32, plan::OptimState::kBf16},
        Setting{4, at::kBFloat16, 1, 1.0, kOnce, {}, plan::SumDtype::kFp32, plan::OptimState::kInt8}),
    [](const auto& named) {
      const Setting& s = named.param;
      return "ranks" + std::to_string(s.ranks) + (s.compute == at::kFloat ? "_fp32" : "_bf16") +
             "_accumulation" + std::to_string(s.accumulation) + (s.grad_clip > 0 ? "_clip" : "") +
             (s.reduce_when == kEvery ? "_every" : "") + (s.reduce ? "_other_wire" : "") +
             (s.accumulate == kAsComputed ? "_sums_in_bf16" : "") +
             (s.state == plan::OptimState::kFp32 ? "" : "_state_in_" + std::string(plan::name(s.state)));
    });

TEST(Law2, ManyRanksEqualOneAtTheSameGlobalBatch) {
  for (const plan::ModelFamily family : plan::language_families()) {
    const TinyOutcome one = train_tiny({.family = family, .ranks = 1});
    for (int64_t ranks = 2; ranks <= 4; ++ranks) {
      const TinyOutcome many = train_tiny({.family = family, .ranks = ranks});
      for (size_t step = 0; step < one.losses.size(); ++step) {
        EXPECT_NEAR(many.losses[step], one.losses[step], 1e-5 * one.losses[step]);
      }
      EXPECT_LT(distance(many, one), 1e-5) << plan::name(family) << " on " << ranks;
    }
  }
}

TEST(BackendReduction, EqualsTheOrderedOneUpToRounding) {
  for (const int64_t ranks : {2, 3, 4}) {
    for (TinyRun run : all_policies({.ranks = ranks, .steps = 8, .accumulation = ranks == 2 ? 3 : 1})) {
      const TinyOutcome ordered = train_tiny(run);
      run.reduction = parallel::Reduction::kBackend;
      const TinyOutcome backend = train_tiny(run);
      for (size_t step = 0; step < ordered.losses.size(); ++step) {
        EXPECT_NEAR(backend.losses[step], ordered.losses[step], 1e-5 * ordered.losses[step])
            << run.policy << " on " << ranks;
      }
      EXPECT_LT(distance(backend, ordered), 1e-5) << run.policy << " on " << ranks;
      if (run.replicas > 1) continue;  // whose sums are counted in other groups
      const auto sums = [&](const TinyOutcome& outcome) {
        const auto found = outcome.traffic.find(plan::Collective::kAllToAll);
        return found == outcome.traffic.end() ? 0 : found->second.bytes;
      };
      EXPECT_GT(sums(ordered), 0) << run.policy;
      EXPECT_EQ(sums(backend), 0) << run.policy << " must not have taken the ordered way";
    }
  }
}

TEST(Accumulation, EqualsOnePassOverTheSameBatch) {
  const TinyOutcome whole = train_tiny({.ranks = 2, .accumulation = 1});
  const TinyOutcome parts = train_tiny({.ranks = 2, .accumulation = 3});
  for (size_t step = 0; step < whole.losses.size(); ++step) {
    EXPECT_NEAR(parts.losses[step], whole.losses[step], 1e-5 * whole.losses[step]);
  }
}

int64_t padded_numel(const TinyOutcome& outcome) {
  int64_t sum = 0;
  for (const plan::FlatLayout& layout : outcome.layouts) sum += layout.numel();
  return sum;
}

TEST(Law5, BytesOnTheWireFollowTheFormulaOfEachPolicy) {
  const int64_t ranks = 4, steps = 3;
  for (const TinyRun& run : all_policies({.ranks = ranks, .steps = steps})) {
    if (run.replicas > 1) continue;
    const plan::Policy& policy = plan::find_policy(run.policy);
    const TinyOutcome outcome = train_tiny(run);
    const int64_t bytes = 4 * padded_numel(outcome);  // fp32
    const int64_t part = bytes * (ranks - 1) / ranks;
    const int64_t ends = 4 * (outcome.layouts.front().numel() + outcome.layouts.back().numel());
    EXPECT_EQ(outcome.traffic.at(plan::Collective::kAllToAll).bytes, steps * part) << run.policy;
    const int64_t scalars = steps * 2 * 8 * (ranks - 1);  // gradient norm and loss, one double each
    int64_t gathered = steps * part;                      // ddp: gradients; zero1, zero2: parameters
    if (policy.shard_parameters) {
      const bool again = policy.reshard_after_forward == plan::Policy::kSameRanks;
      // The root once, and once the last, with which backward begins; what is between them twice.
      gathered = steps * (again ? 2 * part - ends * (ranks - 1) / ranks : part);
    } else if (policy.shard_optimizer) {
      gathered += part;  // and once when training starts
    }
    EXPECT_EQ(outcome.traffic.at(plan::Collective::kAllGather).bytes, gathered + scalars) << run.policy;
  }
}

TEST(Law5, BytesHeldAndSentAreThoseOfThePlan) {
  const plan::ModelFacts facts = plan::describe(test::tiny_model(plan::ModelFamily::kLlama), 8);
  const auto bytes_of = [](at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); };
  const std::pair<at::ScalarType, at::ScalarType> dtypes[] = {{at::kFloat, at::kFloat},
                                                              {at::kBFloat16, at::kBFloat16},
                                                              {at::kFloat, at::kBFloat16},
                                                              {at::kBFloat16, at::kFloat}};
  for (const auto& [compute, reduce] : dtypes) {
    for (const int64_t accumulation : {1, 3}) {
      for (const auto& [reduce_when, accumulate] :
           {std::pair(kOnce, plan::SumDtype::kFp32), std::pair(kEvery, plan::SumDtype::kFp32),
            std::pair(kOnce, kAsComputed)}) {
        if (accumulate == kAsComputed && (compute == at::kFloat || accumulation == 1)) continue;
        const TinyRun base{.family = plan::ModelFamily::kLlama,
                           .ranks = 4,
                           .steps = 2,
                           .accumulation = accumulation,
                           .compute = compute,
                           .reduce = reduce,
                           .accumulate = accumulate,
                           .reduce_when = reduce_when};
        for (const TinyRun& run : all_policies(base)) {
          const TinyOutcome outcome = train_tiny(run);
          const int64_t bytes = bytes_of(compute);
          const plan::EngineSetting setting{
              .policy = plan::find_policy(run.policy),
              .mesh = plan::MeshShape({1, run.replicas, 4 / run.replicas, 1, 1}),
              .compute_bytes = bytes,
              .wire_bytes = bytes_of(reduce),
              .wire_as_computed = compute == reduce,
              .accumulation = accumulation,
              .reduces_once = reduce_when != kEvery,
              .sums_in_fp32 = accumulate == plan::SumDtype::kFp32};
          EXPECT_EQ(outcome.state, plan::state_bytes(test::planned_step(facts.units, setting)))
              << run.policy << ", " << bytes << " bytes, accumulation " << accumulation;
          EXPECT_EQ(outcome.step_bytes, test::planned_step(facts.units, setting).wire_bytes())
              << run.policy << ", " << bytes << " bytes, accumulation " << accumulation;
        }
      }
    }
  }
}

TEST(Law5, StateInFewerBitsTakesTheBytesOfThePlan) {
  const plan::ModelFacts facts = plan::describe(test::tiny_model(plan::ModelFamily::kLlama), 8);
  for (const plan::OptimState state : plan::all_values<plan::OptimState>()) {
    for (const TinyRun& run :
         all_policies({.family = plan::ModelFamily::kLlama, .ranks = 4, .steps = 1, .state = state})) {
      const plan::EngineSetting setting{.policy = plan::find_policy(run.policy),
                                        .mesh = plan::MeshShape({1, run.replicas, 4 / run.replicas, 1, 1}),
                                        .moments = plan::state_bytes_of_block({.state = state})};
      EXPECT_EQ(train_tiny(run).state, plan::state_bytes(test::planned_step(facts.units, setting)))
          << run.policy << ", " << plan::name(state);
    }
  }
}

/// 64 micro-batches whose gradients are 1 add up to 64 in fp32; so do those of 1/512 behind a first one of 1,
/// which bf16 does not see.
TEST(Accumulation, IsInFp32UnlessAskedOtherwise) {
  const auto sum_of = [](plan::SumDtype accumulate) {
    double sum = 0.0;
    test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
      const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape({1, 1, 1, 1, 1}));
      torch::nn::Linear line(torch::nn::LinearOptions(1, 1).bias(false));
      const auto engine = parallel::data_parallel(*line, mesh,
                                                  {.compute = at::kBFloat16,
                                                   .reduce = at::kFloat,
                                                   .accumulate = accumulate,
                                                   .average = parallel::Average::kSum});
      for (int64_t pass = 0; pass < 65; ++pass) {
        const at::Tensor x = at::full({1, 1}, pass == 0 ? 1.0 : 1.0 / 512, at::kBFloat16);
        const at::Tensor loss = line->forward(x).sum();
        pass < 64 ? engine->accumulate(loss) : engine->backward(loss);
      }
      sum = engine->grad_norm();
    });
    return sum;
  };
  EXPECT_EQ(sum_of(plan::SumDtype::kFp32), 1.0 + 64.0 / 512);
  EXPECT_EQ(sum_of(kAsComputed), 1.0);
}

TEST(Law5, SocketsCarryTheBytesOfThePlan) {
  const plan::ModelFacts facts = plan::describe(test::tiny_model(plan::ModelFamily::kLlama), 8);
  for (const TinyRun& run :
       all_policies({.family = plan::ModelFamily::kLlama, .ranks = 4, .steps = 1, .messages = true})) {
    const TinyOutcome outcome = train_tiny(run);
    const plan::EngineSetting setting{.policy = plan::find_policy(run.policy),
                                      .mesh = plan::MeshShape({1, run.replicas, 4 / run.replicas, 1, 1})};
    const int64_t planned = 4 * test::planned_step(facts.units, setting).wire_bytes();
    EXPECT_GE(outcome.socket_bytes, planned) << run.policy;
    EXPECT_LE(outcome.socket_bytes, planned + planned / 10)
        << run.policy << ": beyond the headers of messages";
  }
}

/// bf16 becomes fp32 without loss, and sums are fp32 whatever travels.
TEST(WireDtype, Bf16GradientsThatTravelAsFp32GiveTheSameBits) {
  for (const TinyRun& run : all_policies({.ranks = 4, .compute = at::kBFloat16})) {
    TinyRun wide = run;
    wide.reduce = at::kFloat;
    EXPECT_EQ(train_tiny(wide).digest, train_tiny(run).digest) << run.policy;
  }
}

/// The gradients of one rank's batch, without an engine.
std::map<std::string, at::Tensor> own_gradients(const plan::ModelConfig& config, const at::Tensor& tokens,
                                                double scale) {
  const auto model = nn::build(config);
  nn::InitialWeights(config, 3).fill(*model);
  (model->loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8)) * scale).backward();
  std::map<std::string, at::Tensor> grads;
  for (const auto& entry : model->named_parameters()) grads.emplace(entry.key(), entry.value().grad());
  return grads;
}

TEST(WireDtype, Fp32GradientsThatTravelAsBf16AreRoundedOnceAndSummedInFp32) {
  constexpr int64_t kRanks = 2;
  const plan::ModelConfig config = test::tiny_model(plan::ModelFamily::kLlama);
  const plan::ModelFacts facts = plan::describe(config, 8);
  const at::Tensor tokens = test::tiny_tokens(0, 2 * kRanks, config.vocab_size);
  test::run_ranks(kRanks, [&](std::shared_ptr<comm::World> world) {
    test::EngineOnModel trained(
        config, facts, world, {.policy = plan::find_policy(plan::PolicyName::kDdp), .reduce = at::kBFloat16},
        3);
    const at::Tensor mine = tokens.narrow(0, 2 * world->rank(), 2);
    trained.engine.backward(trained.model->loss(mine.narrow(1, 0, 8), mine.narrow(1, 1, 8)), 0.5);
    trained.engine.grad_norm();  // waits for the reductions
    const std::vector<optim::FlatParam> params = trained.engine.optimizer_params();
    const auto first = own_gradients(config, tokens.narrow(0, 0, 2), 0.5);
    const auto second = own_gradients(config, tokens.narrow(0, 2, 2), 0.5);
    for (size_t i = 0; i < facts.units.size(); ++i) {
      const plan::FlatLayout layout(facts.units[i].params, kRanks);
      for (const plan::FlatEntry& entry : layout.entries()) {
        const auto rounded = [&](const at::Tensor& grad) { return grad.to(at::kBFloat16).to(at::kFloat); };
        const at::Tensor wanted = rounded(first.at(entry.name)) + rounded(second.at(entry.name));
        const at::Tensor got = params[i].grad.narrow(0, entry.offset, entry.numel).view(entry.shape);
        EXPECT_TRUE(at::equal(got, wanted)) << entry.name << " on rank " << world->rank();
      }
    }
  });
}

TEST(Law7, OverlapAndBucketsDoNotChangeTheWeights) {
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    const std::string reference = train_tiny({.policy = "ddp", .ranks = 3, .compute = compute}).digest;
    for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
      EXPECT_EQ(train_tiny({.policy = policy, .ranks = 3, .compute = compute, .overlap = false}).digest,
                reference)
          << policy;
    }
    for (const char* policy : {"ddp", "zero1", "zero2"}) {
      for (const int64_t bytes : {1, 5000, 1 << 20}) {
        EXPECT_EQ(
            train_tiny({.policy = policy, .ranks = 3, .compute = compute, .bucket_bytes = bytes}).digest,
            reference)
            << policy << ", buckets of " << bytes << " bytes";
      }
    }
  }
}

TEST(Law2, RoundedStateDependsOnNoUnits) {
  for (const plan::OptimState state : {plan::OptimState::kBf16, plan::OptimState::kInt8}) {
    const std::string reference = train_tiny({.policy = "fsdp", .ranks = 3, .state = state}).digest;
    EXPECT_NE(reference, train_tiny({.policy = "fsdp", .ranks = 3}).digest);
    for (const int64_t bytes : {1, 5000, 1 << 20}) {
      EXPECT_EQ(train_tiny({.policy = "zero1", .ranks = 3, .state = state, .bucket_bytes = bytes}).digest,
                reference)
          << plan::name(state) << ", buckets of " << bytes << " bytes";
    }
  }
}

TEST(Law2, NeighboursMayKeepParametersBetweenForwardAndBackward) {
  const std::string reference = train_tiny({.policy = "ddp", .ranks = 4}).digest;
  for (const int64_t together : {0, 1, 2}) {
    const TinyOutcome outcome = train_tiny({.policy = "fsdp", .ranks = 4, .reshard = together});
    EXPECT_EQ(outcome.digest, reference) << together;
    if (together != 2) continue;
    // The second gather of a block goes through the pairs.
    const int64_t part = 4 * padded_numel(outcome) * 3 / 4, scalars = 20 * 2 * 8 * 3;
    EXPECT_EQ(outcome.traffic.at(plan::Collective::kAllGather).bytes, 20 * part + scalars);
  }
}

TEST(Accumulation, ReducesOncePerStepOrAfterEveryMicroBatch) {
  const int64_t steps = 4, units = 4;  // the root and three blocks
  for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      TinyRun run{.policy = policy, .steps = steps, .accumulation = 3, .compute = compute};
      EXPECT_EQ(train_tiny(run).reductions, steps * units) << policy;
      run.reduce_when = kEvery;
      EXPECT_EQ(train_tiny(run).reductions, 3 * steps * units) << policy;
    }
  }
}

TEST(ReducedGradients, AreThereFromReductionToTheNextUse) {
  for (const char* policy : {"zero1", "zero2", "fsdp"}) {
    test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
      const plan::ModelConfig config = test::tiny_model(plan::ModelFamily::kLlama);
      test::EngineOnModel trained(config, plan::describe(config, 8), world,
                                  {.policy = plan::find_policy(policy), .compute = at::kBFloat16}, 3);
      parallel::DataParallel& engine = trained.engine;
      const std::vector<optim::FlatParam> params = engine.optimizer_params();
      const auto optimizer = optim::build({.lr = 1e-2}, params);
      const auto held = [&] {
        return std::ranges::count_if(params,
                                     [](const auto& param) { return parallel::has_storage(param.grad); });
      };
      const at::Tensor tokens = at::arange(9, at::kLong).view({1, 9});
      const auto forward = [&] {
        return trained.model->loss(tokens.narrow(1, 0, 8).contiguous(), tokens.narrow(1, 1, 8).contiguous());
      };
      const auto all = static_cast<int64_t>(params.size());
      for (int step = 0; step < 2; ++step) {
        const at::Tensor loss = forward();
        EXPECT_EQ(held(), 0) << policy << ", step " << step;
        engine.backward(loss, 0.5);
        EXPECT_EQ(held(), all) << policy << ", step " << step;
        engine.step(*optimizer);
        EXPECT_EQ(held(), all) << policy << ", step " << step;
        EXPECT_EQ(engine.nonfinite_parameter(), "");
      }
      forward();
      EXPECT_EQ(engine.nonfinite_parameter(), "");
      EXPECT_THROW(engine.step(*optimizer), LogicError) << policy;
    });
  }
}

TEST(DataParallel, DecaysTheParametersWhoseRecordSaysSo) {
  test::run_ranks(1, [](std::shared_ptr<comm::World> world) {
    const plan::ModelConfig config = test::tiny_model(plan::ModelFamily::kLlama);
    plan::ModelFacts facts = plan::describe(config, 8);
    const auto decayed = [&] {
      test::EngineOnModel trained(config, facts, world, {}, 3);
      int64_t numel = 0;
      for (const optim::FlatParam& param : trained.engine.optimizer_params()) {
        for (const optim::Segment& segment : param.segments)
          numel += segment.group.decay_factor > 0.0 ? segment.range.size() : 0;
      }
      return numel;
    };
    int64_t matrices = 0;
    for (const plan::UnitSpec& unit : facts.units) {
      for (const plan::ParamSpec& param : unit.params)
        matrices += param.shape.size() == 2 ? param.numel() : 0;
    }
    EXPECT_EQ(decayed(), matrices);
    plan::ParamSpec& table = facts.units[0].params[0];
    table.decays = false;
    EXPECT_EQ(decayed(), matrices - table.numel());
  });
}

TEST(DataParallel, RefusesUnitsThatDoNotCoverTheModule) {
  test::run_ranks(1, [](std::shared_ptr<comm::World> world) {
    const plan::ModelConfig config = test::tiny_model(plan::ModelFamily::kGpt2);
    const auto model = nn::build(config);
    std::vector<plan::UnitSpec> units = plan::describe(config, 8).units;
    units.pop_back();
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 1));
    const auto zeros = [](const std::string&, const plan::Region&, at::Tensor& out) { out.zero_(); };
    EXPECT_THROW(parallel::DataParallel(*model, units, mesh, {.policy = plan::find_policy("ddp")}, zeros),
                 LogicError);
    units.push_back(units.back());
    EXPECT_THROW(parallel::DataParallel(*model, units, mesh, {.policy = plan::find_policy("ddp")}, zeros),
                 LogicError);
  });
}

TEST(SkippedStep, LeavesNoTrace) {
  for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
    for (const auto compute : {at::kFloat, at::kBFloat16}) {
      for (const int64_t ranks : {1, 2}) {
        TinyRun run{.policy = policy, .ranks = ranks, .steps = 4, .compute = compute};
        const std::string plain = train_tiny(run).digest;
        run.overflow_at = 2;
        EXPECT_EQ(train_tiny(run).digest, plain) << policy << " on " << ranks << " ranks";
      }
    }
  }
}

}  // namespace
}  // namespace trireme
