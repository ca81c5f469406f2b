// Planted lies keep runs from being compared, and each of them is named; a clean control passes.
#include "trireme/bench/verify.h"

#include <gtest/gtest.h>

#include <functional>

#include "tests/bench/planted.h"

namespace trireme::bench {
namespace {

/// The reason for which a target with this change is blocked; empty: it is not.
std::string reason_after(const std::function<void(TargetResult&)>& plant) {
  TargetResult target = planted_target();
  plant(target);
  judge(target, "");
  EXPECT_EQ(target.state == State::kBlocked, !target.reason.empty());
  return target.reason;
}

void expect_blocked(const std::string& by, const std::function<void(TargetResult&)>& plant) {
  const std::string reason = reason_after(plant);
  EXPECT_NE(reason.find(by), std::string::npos) << "'" << reason << "' does not say '" << by << "'";
}

TEST(Verify, CleanRunsAreCompared) {
  EXPECT_EQ(reason_after([](TargetResult&) {}), "");
}

TEST(Verify, AnotherBatchIsNamed) {
  expect_blocked("tokens a step is 256, and 512 of the reference",
                 [](TargetResult& target) { target.samples[1].workload[kTokensKey] = "256"; });
}

TEST(Verify, ASmallerModelIsNamed) {
  expect_blocked("model.d_model is 64, and 32 of the reference", [](TargetResult& target) {
    for (Sample& sample : target.samples) {
      if (sample.slot.arm == 0) sample.workload["model.d_model"] = "32";
    }
  });
}

TEST(Verify, OtherWeightsAreNamed) {
  expect_blocked("block 1, b: its weights have the digest ff",
                 [](TargetResult& target) { target.samples[1].weights_digest = "ff"; });
}

/// Runs of which no two end alike; proofs, where there are some, all end with `digest`, but the last with
/// `last`.
void vary(TargetResult& target, const std::string& digest, const std::string& last) {
  for (size_t i = 0; i < target.samples.size(); ++i) {
    target.samples[i].why_bits_vary = "attention adds as it likes";
    target.samples[i].weights_digest = fmt::format("{:02x}", i);
    target.samples[i].losses[7] *= 1.0 + 1e-3 * static_cast<double>(i);  // small differences have grown
  }
  for (int64_t arm = 0; arm < 2 && !digest.empty(); ++arm) {
    target.proofs.push_back(planted_sample({.arm = arm}, 20.0));
    target.proofs.back().weights_digest = arm == 1 ? last : digest;
    target.proofs.back().losses.resize(6);
  }
}

TEST(Verify, WhereBitsVaryDeterministicRunsTell) {
  TargetResult target = planted_target();
  EXPECT_FALSE(needs_proofs(target));
  vary(target, "", "");
  EXPECT_TRUE(needs_proofs(target));
  EXPECT_EQ(reason_after([](TargetResult& varying) { vary(varying, "aa", "aa"); }), "");
  expect_blocked("the loss of step 8", [](TargetResult& varying) { vary(varying, "", ""); });
  expect_blocked("after 6 steps with train.deterministic=true its weights have the digest bb, and aa",
                 [](TargetResult& varying) { vary(varying, "aa", "bb"); });
  expect_blocked("the loss of step 3 is", [](TargetResult& varying) {
    vary(varying, "aa", "aa");
    varying.samples[1].losses[2] *= 1.1;
  });
  expect_blocked("run with train.deterministic=true, it ended with code 5", [](TargetResult& varying) {
    vary(varying, "aa", "aa");
    varying.proofs[1].code = 5;
  });
}

TEST(Verify, AnArmOwesNoMoreThanItDeclares) {
  const auto plant = [](Owed owed, double bound, double loss) {
    return [=](TargetResult& target) {
      target.arms[1].owed = owed;
      target.arms[1].bound = bound;
      for (Sample& sample : target.samples) {
        if (sample.slot.arm == 1) sample.losses[3] = loss;
        if (sample.slot.arm == 1) sample.weights_digest = "ff";
      }
    };
  };
  const double loss = 5.0 - 0.3;
  EXPECT_EQ(reason_after(plant(Owed::kSameLosses, 0.0, loss * (1.0 + 0.9e-5))), "");
  expect_blocked("the loss of step 4 is", plant(Owed::kSameLosses, 0.0, loss * (1.0 + 1.1e-5)));
  EXPECT_EQ(reason_after(plant(Owed::kNearLosses, 0.02, loss * 1.019)), "");
  expect_blocked("where 0.02 is allowed", plant(Owed::kNearLosses, 0.02, loss * 1.021));
  EXPECT_EQ(reason_after(plant(Owed::kFiniteLosses, 0.0, 77.0)), "");
}

TEST(Verify, ACrashIsAFailureAndNoTime) {
  expect_blocked("it ended with code 139", [](TargetResult& target) {
    target.samples[2].code = 139;
    target.samples[2].step_ms.assign(8, 0.001);
  });
}

TEST(Verify, MissingStepsAreNamed) {
  expect_blocked("7 steps and 8 losses were recorded, not 8",
                 [](TargetResult& target) { target.samples[3].step_ms.pop_back(); });
  expect_blocked("the loss of step 5 is nan",
                 [](TargetResult& target) { target.samples[3].error = "the loss of step 5 is nan"; });
}

TEST(Verify, ClonedSamplesAreNamed) {
  expect_blocked("its step times are those of block 1, a, bit by bit",
                 [](TargetResult& target) { target.samples[4].step_ms = target.samples[0].step_ms; });
  expect_blocked("it has the directory of block 1, a",
                 [](TargetResult& target) { target.samples[4].directory = target.samples[0].directory; });
}

TEST(Verify, AClockThatJumpsIsNamed) {
  expect_blocked("but the whole run", [](TargetResult& target) { target.samples[1].wall_s = 0.02; });
  expect_blocked("step 6 took -3 ms", [](TargetResult& target) { target.samples[1].step_ms[5] = -3.0; });
  expect_blocked("more than the longest step took",
                 [](TargetResult& target) { target.samples[1].exposed_ms = 100.0; });
}

TEST(Verify, BytesThatNoProgramAskedForAreNamed) {
  expect_blocked("a rank sent 12 bytes in a step, and its program says 10",
                 [](TargetResult& target) { target.samples[1].sent_bytes = 12; });
  EXPECT_EQ(reason_after([](TargetResult& target) { target.samples[1].predicted_sent_bytes = -1; }), "")
      << "no formula tells of this one";
}

/// All arms of a wrong engine agree; one rank that shards nothing does not.
TEST(Verify, AReferenceThatIsWrongItselfIsNamed) {
  expect_blocked("one rank that shards nothing", [](TargetResult& target) {
    for (Sample& sample : target.samples) sample.losses[2] *= 1.0001;
  });
  expect_blocked("it trained another workload",
                 [](TargetResult& target) { target.twins[0].workload["seed"] = "1"; });
  expect_blocked("it ended with code 1", [](TargetResult& target) { target.twins[0].code = 1; });
}

/// Losses that are still equal do not show it.
TEST(Verify, GradientsThatAreWrongInEveryArmAreNamed) {
  const auto enlarged = [](size_t step, double factor) {
    return [=](TargetResult& target) {
      for (Sample& sample : target.samples) sample.grad_norms[step] *= factor;
    };
  };
  expect_blocked("the gradient norm of step 2 is", enlarged(1, 1.005));
  expect_blocked("the gradient norm of step 6 is", enlarged(5, 1.00011));
  EXPECT_EQ(reason_after(enlarged(5, 1.00009)), "");
  EXPECT_EQ(reason_after(enlarged(6, 1.005)), "") << "small differences have grown";
  EXPECT_EQ(reason_after([](TargetResult& target) { target.twins[0].grad_norms.clear(); }), "")
      << "an older record has none";
}

TEST(Verify, AnOptimizerThatDoesNotStepIsNamed) {
  expect_blocked("one rank that shards nothing", [](TargetResult& target) {
    for (Sample& sample : target.samples) sample.losses.assign(8, 5.0);
  });
}

TEST(Verify, SaysWhereThereIsNoTwin) {
  TargetResult target = planted_target();
  target.twins.clear();
  judge(target, "one rank does not have the memory for it");
  EXPECT_EQ(target.state, State::kMeasured);
  const auto said = [](const Check& check) { return check.detail.starts_with("not checked: one rank"); };
  EXPECT_TRUE(std::ranges::any_of(target.checks, said));
}

}  // namespace
}  // namespace trireme::bench
