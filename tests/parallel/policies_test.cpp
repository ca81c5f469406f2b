// Laws 1, 2 and 5: initial weights do not depend on the layout; all policies give the same bits; many ranks
// equal one; bytes on the wire follow the formula of each policy.
#include <gtest/gtest.h>

#include "tests/support/tiny_training.h"
#include "trireme/base/error.h"
#include "trireme/plan/policy.h"

namespace trireme {
namespace {

using test::TinyOutcome;
using test::TinyRun;
using test::train_tiny;

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const plan::Policy& policy : plan::policies()) names.emplace_back(policy.name);
  return names;
}

TEST(Law1, InitialWeightsAreTheSameForAnyLayout) {
  for (const char* family : {"gpt2", "llama"}) {
    const std::string one = train_tiny({.policy = "ddp", .family = family, .ranks = 1, .steps = 0}).digest;
    for (const std::string& policy : policy_names()) {
      for (int64_t ranks = 1; ranks <= 4; ++ranks) {
        EXPECT_EQ(train_tiny({.policy = policy, .family = family, .ranks = ranks, .steps = 0}).digest, one)
            << policy << " on " << ranks;
      }
    }
  }
}

struct Setting {
  int64_t ranks;
  at::ScalarType compute;
  int64_t accumulation;
  double grad_clip;
};

class Law2 : public ::testing::TestWithParam<Setting> {};

TEST_P(Law2, AllPoliciesGiveBitIdenticalWeightsAfter20Steps) {
  const Setting setting = GetParam();
  for (const char* family : {"gpt2", "llama"}) {
    TinyRun run{.policy = "ddp",
                .family = family,
                .ranks = setting.ranks,
                .accumulation = setting.accumulation,
                .grad_clip = setting.grad_clip,
                .compute = setting.compute};
    const TinyOutcome reference = train_tiny(run);
    EXPECT_LT(reference.losses.back(), 0.8 * reference.losses.front())
        << "the runs must have learnt something";
    for (const std::string& policy : policy_names()) {
      run.policy = policy;
      EXPECT_EQ(train_tiny(run).digest, reference.digest) << family << " " << policy;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, Law2,
                         ::testing::Values(Setting{2, at::kFloat, 1, 1.0}, Setting{3, at::kFloat, 1, 1.0},
                                           Setting{4, at::kFloat, 1, 1.0}, Setting{2, at::kFloat, 3, 0.0},
                                           Setting{2, at::kBFloat16, 1, 1.0},
                                           Setting{4, at::kBFloat16, 3, 1.0}),
                         [](const auto& named) {
                           const Setting& s = named.param;
                           return "ranks" + std::to_string(s.ranks) +
                                  (s.compute == at::kFloat ? "_fp32" : "_bf16") + "_accumulation" +
                                  std::to_string(s.accumulation) + (s.grad_clip > 0 ? "_clip" : "");
                         });

TEST(Law2, ManyRanksEqualOneAtTheSameGlobalBatch) {
  for (const char* family : {"gpt2", "llama", "mlp"}) {
    const TinyOutcome one = train_tiny({.family = family, .ranks = 1});
    for (int64_t ranks = 2; ranks <= 4; ++ranks) {
      const TinyOutcome many = train_tiny({.family = family, .ranks = ranks});
      for (size_t step = 0; step < one.losses.size(); ++step) {
        EXPECT_NEAR(many.losses[step], one.losses[step], 1e-5 * one.losses[step]);
      }
      double difference = 0.0, size = 0.0;
      for (const auto& [name, weight] : one.weights) {
        difference += (many.weights.at(name) - weight).square().sum().item<double>();
        size += weight.square().sum().item<double>();
      }
      EXPECT_LT(std::sqrt(difference / size), 1e-5) << family << " on " << ranks;
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
  for (const plan::Policy& policy : plan::policies()) {
    const TinyOutcome outcome =
        train_tiny({.policy = std::string(policy.name), .ranks = ranks, .steps = steps});
    const int64_t bytes = 4 * padded_numel(outcome);  // fp32
    const int64_t part = bytes * (ranks - 1) / ranks;
    const int64_t root = 4 * outcome.layouts.front().numel() * (ranks - 1) / ranks;
    EXPECT_EQ(outcome.traffic.at(plan::Collective::kAllToAll).bytes, steps * part) << policy.name;
    const int64_t scalars = steps * 2 * 8 * (ranks - 1);  // gradient norm and loss, one double each
    int64_t gathered = steps * part;                      // ddp: gradients; zero1, zero2: parameters
    if (policy.shard_parameters)
      gathered = steps * (2 * part - root);  // blocks twice, the root once
    else if (policy.shard_optimizer)
      gathered += part;  // and once when training starts
    EXPECT_EQ(outcome.traffic.at(plan::Collective::kAllGather).bytes, gathered + scalars) << policy.name;
  }
}

TEST(DataParallel, RefusesUnitsThatDoNotCoverTheModule) {
  test::run_ranks(1, [](std::shared_ptr<comm::World> world) {
    const plan::ModelConfig config = test::tiny_model("gpt2");
    const auto model = nn::build(config);
    std::vector<plan::UnitSpec> units = plan::describe(config, 8).units;
    units.pop_back();
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 1));
    const auto zeros = [](const std::string&, int64_t, std::span<float> out) {
      std::fill(out.begin(), out.end(), 0.f);
    };
    EXPECT_THROW(parallel::DataParallel(*model, units, mesh, {.policy = plan::find_policy("ddp")}, zeros),
                 LogicError);
    units.push_back(units.back());
    EXPECT_THROW(parallel::DataParallel(*model, units, mesh, {.policy = plan::find_policy("ddp")}, zeros),
                 LogicError);
  });
}

}  // namespace
}  // namespace trireme
