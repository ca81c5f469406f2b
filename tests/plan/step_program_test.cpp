// Step programs: whole, in order, and with memory where it is used, for every policy and setting; and what is
// said of those that are not.
#include "trireme/plan/step_program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "tests/support/planned_step.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

using Event = UseOrder::Event;

const std::vector<UnitSpec> kUnits = {{"root", {{"a", {1000, 8}}}},
                                      {"h.0", {{"b", {4000, 8}}, {"c", {1024}}}},
                                      {"h.1", {{"d", {4000, 8}}, {"e", {1024}}}},
                                      {"head", {{"f", {2000, 8}}}}};
const std::vector<int64_t> kActivations = {0, 700, 700, 0};

/// Every policy on 1, 2 and 4 ranks, with and without replicas, in every setting that a program depends on.
void for_all_settings(const std::function<void(const EngineSetting& setting)>& body) {
  for (const Policy& policy : policies()) {
    for (const int64_t ranks : {1, 2, 4}) {
      for (const auto& [compute, wire] : {std::pair{4, 4}, {2, 2}, {2, 4}}) {
        for (const int64_t accumulation : {1, 2, 3}) {
          for (const int64_t prefetch : {0, 1, 2}) {
            for (const bool flag : {false, true}) {
              for (const UseFrom use_from : {UseFrom::kRunUnit, UseFrom::kBuckets}) {
                if (policy.shard_parameters && use_from == UseFrom::kBuckets) continue;
                body({.policy = policy,
                      .mesh = MeshShape({1, policy.hybrid ? 2 : 1, ranks, 1, 1}),
                      .compute_bytes = compute,
                      .wire_bytes = wire,
                      .wire_as_computed = compute == wire,
                      .accumulation = accumulation,
                      .reduces_once = !flag,
                      .prefetch = prefetch,
                      .beside = prefetch > 0,
                      .use_from = use_from});
              }
            }
          }
        }
      }
    }
  }
}

EngineSetting sharded_on_four() {
  return {
      .policy = find_policy("fsdp"), .mesh = MeshShape({1, 1, 4, 1, 1}), .compute_bytes = 2, .wire_bytes = 2};
}

int64_t place_of(const StepProgram& program, ActionKind kind, const std::string& unit) {
  const auto found = std::ranges::find_if(program.actions, [&](const Action& action) {
    return action.kind == kind && action.unit >= 0 &&
           program.units[static_cast<size_t>(action.unit)].name == unit;
  });
  return found - program.actions.begin();
}

/// What verify() says; empty: nothing.
std::string verdict(const StepProgram& program) {
  try {
    verify(program);
  } catch (const LogicError& error) {
    return error.what();
  }
  return {};
}

TEST(StepProgram, IsWholeAndUsesNothingWithoutMemoryInAllSettings) {
  int64_t cases = 0;
  for_all_settings([&](const EngineSetting& setting) {
    ++cases;
    const StepProgram program = test::planned_step(kUnits, setting, kActivations);
    ASSERT_EQ(verdict(program), "") << setting.policy.label() << "\n" << to_text(program);
    const auto held = held_bytes(program);
    for (const HeldBytes& bytes : held) ASSERT_GE(*std::ranges::min_element(bytes.by_role), 0);
    ASSERT_EQ(held.front()[Role::kActivations], 0);
    ASSERT_EQ(held.back()[Role::kActivations], 0) << "backward has used them up";
  });
  EXPECT_GT(cases, 1000);
}

TEST(StepProgram, BytesOfBuffersThatOutliveItsActionsAreNotCounted) {
  StepProgram program = test::planned_step(kUnits, sharded_on_four(), kActivations);
  program.actions.resize(program.actions.size() / 2);
  EXPECT_THROW(held_bytes(program), LogicError);
}

TEST(StepProgram, ComesBackFromItsText) {
  for_all_settings([&](const EngineSetting& setting) {
    const StepProgram program = test::planned_step(kUnits, setting, kActivations);
    ASSERT_EQ(step_program_from_text(to_text(program)), program) << to_text(program);
  });
}

TEST(StepProgram, OneOfThreeMicroBatchesStandsForMore) {
  for_all_settings([&](EngineSetting setting) {
    setting.accumulation = StepProgram::kMicroBatchesShown;
    const StepProgram three = test::planned_step(kUnits, setting);
    setting.accumulation = 6;
    ASSERT_EQ(three.wire_bytes(6), test::planned_step(kUnits, setting).wire_bytes());
  });
}

TEST(StepProgram, HooksSendGradientsInFewerBytes) {
  constexpr int64_t kWhole = 8000 + 2 * 33024 + 16000;
  EngineSetting setting = sharded_on_four();
  setting.compute_bytes = setting.wire_bytes = 4;
  setting.policy = find_policy("zero2");
  const auto sent = [&](CommHook hook) {
    setting.hook = hook;
    const StepProgram program = test::planned_step(kUnits, setting);
    if (hook_obstacle(setting.policy, hook).empty()) {
      EXPECT_EQ(verdict(program), "");
    }
    return sent_bytes(program, setting, 1);
  };
  const int64_t gathered = 4 * kWhole / 4 * 3;  // of four bytes, three quarters go to others
  EXPECT_EQ(sent(CommHook::kNone), 2 * gathered);
  EXPECT_EQ(sent(CommHook::kFp16), gathered + gathered / 2);
  const int64_t blocks = 8 + 2 * 33 + 16;  // of 256 in shards of 2000, 8256 and 4000 elements
  EXPECT_EQ(sent(CommHook::kInt8), gathered + 3 * blocks * (256 + 4));
  EXPECT_EQ(sent(CommHook::kTopK), std::nullopt);
  EXPECT_EQ(sent(CommHook::kPowerSgd), std::nullopt);
  EXPECT_EQ(sent(CommHook::kLocalSgd), std::nullopt) << "ranks that shard cannot train alone";
  setting.policy = find_policy("ddp");
  EXPECT_EQ(sent(CommHook::kLocalSgd), 2 * gathered) << "an average of fp32 masters";
}

TEST(StepProgram, BackendsSumInTheDtypeOfTheWire) {
  EngineSetting setting = sharded_on_four();
  setting.policy = find_policy("zero2");
  const int64_t ordered = test::planned_step(kUnits, setting).wire_bytes();
  setting.reduction = Reduction::kBackend;
  const StepProgram on_cpus = test::planned_step(kUnits, setting);
  EXPECT_EQ(verdict(on_cpus), "");
  EXPECT_EQ(on_cpus.wire_bytes(), ordered + ordered / 2) << "Gloo reduces all of it everywhere";
  setting.device = Device::kCuda;
  EXPECT_EQ(test::planned_step(kUnits, setting).wire_bytes(), ordered);
}

TEST(StepProgram, GathersAheadOnlyBesideComputation) {
  EngineSetting setting = sharded_on_four();
  const auto at_forward_of = [&](const char* unit) {
    const StepProgram program = test::planned_step(kUnits, setting);
    return held_bytes(
        program)[static_cast<size_t>(place_of(program, ActionKind::kForward, unit))][Role::kParameters];
  };
  constexpr int64_t kRoot = 2 * 8000, kBlock = 2 * 33024, kHead = 2 * 16000;
  setting.prefetch = 1;
  EXPECT_EQ(at_forward_of("h.0"), kRoot + kBlock);
  setting.beside = true;
  EXPECT_EQ(at_forward_of("h.0"), kRoot + 2 * kBlock);
  setting.prefetch = 2;
  EXPECT_EQ(at_forward_of("h.0"), kRoot + 2 * kBlock + kHead);
  for (const int64_t prefetch : {3, 4}) {
    setting.prefetch = prefetch;
    const StepProgram program = test::planned_step(kUnits, setting);
    const auto before_the_root = program.actions.begin() + place_of(program, ActionKind::kForward, "root");
    const auto gathered = std::count_if(program.actions.begin(), before_the_root, [](const Action& action) {
      return action.kind == ActionKind::kUnshard;
    });
    EXPECT_EQ(gathered, std::min<int64_t>(prefetch + 1, std::ssize(kUnits))) << prefetch;
  }
}

TEST(StepProgram, SlicesBetweenForwardAndBackwardAreOfTheRanksThatShareThem) {
  EngineSetting setting = sharded_on_four();
  for (const int64_t together : {2, 4}) {
    setting.policy.reshard_after_forward = together;
    const StepProgram program = test::planned_step(kUnits, setting);
    const auto slice = std::ranges::find_if(program.buffers, [](const Buffer& buffer) {
      return buffer.role == Role::kSlice && buffer.unit == 1;
    });
    ASSERT_NE(slice, program.buffers.end()) << together;
    EXPECT_EQ(slice->bytes, 2 * 33024 / together);
  }
}

/// The sum that was reduced last is still being gathered: it is updated behind as many other parameters as it
/// has, and no later.
TEST(StepProgram, TheUnitThatWasReducedLastIsUpdatedALittleLater) {
  EngineSetting setting = sharded_on_four();
  setting.policy = find_policy("ddp");
  setting.beside = true;
  const auto units = program_units(kUnits, setting);
  UseOrder order = declared_order(units, setting.use_from);
  const auto updates = [&](std::vector<int64_t> reductions) {
    order.reductions = std::move(reductions);
    std::vector<int64_t> updated;
    for (const Action& action : step_program(units, setting, order).actions) {
      if (action.kind == ActionKind::kUpdate) updated.push_back(action.unit);
    }
    return updated;
  };
  ASSERT_TRUE(setting.gathers_sum());
  // In reverse they are root, h.0, h.1, head: the 8,000 of the root wait for the 33,024 of h.0.
  EXPECT_EQ(updates({3, 2, 1, 0}), (std::vector<int64_t>{1, 0, 2, 3}));
  // The 16,000 of the head, which come second, wait for those of h.0 as well.
  EXPECT_EQ(updates({0, 2, 1, 3}), (std::vector<int64_t>{0, 1, 3, 2}));
  // The 33,024 of h.0 wait for those of h.1, and the head has its turn behind them.
  EXPECT_EQ(updates({0, 3, 2, 1}), (std::vector<int64_t>{0, 2, 1, 3}));
}

TEST(StepProgram, UnitsThatWereUsedTwiceAreGatheredTwice) {
  const EngineSetting setting = sharded_on_four();
  const auto units = program_units(kUnits, setting);
  UseOrder order;
  order.forward = {0, 1, 2, 1, 3};
  for (const int64_t unit : {3, 1, 2}) order.backward.push_back({Event::Kind::kBegin, unit});
  order.backward.push_back({Event::Kind::kEnd, 1});
  for (const int64_t unit : {3, 2, 1, 0}) order.backward.push_back({Event::Kind::kComplete, unit});
  const StepProgram program = step_program(units, setting, order);
  EXPECT_EQ(verdict(program), "");
  const auto gathers = std::ranges::count_if(program.actions, [](const Action& action) {
    return action.kind == ActionKind::kUnshard && action.unit == 1;
  });
  EXPECT_EQ(gathers, 3) << "twice in forward, once in backward";
}

TEST(StepProgram, FrozenUnitsAreNeitherReducedNorGivenGradients) {
  EngineSetting setting = sharded_on_four();
  auto units = program_units(kUnits, setting);
  units[1].trainable = false;
  const StepProgram program = step_program(units, setting, declared_order(units, setting.use_from));
  EXPECT_EQ(verdict(program), "");
  EXPECT_EQ(place_of(program, ActionKind::kReduce, "h.0"), std::ssize(program.actions));
  EXPECT_TRUE(std::ranges::none_of(program.buffers, [](const Buffer& buffer) {
    return buffer.role == Role::kGradients && buffer.unit == 1;
  }));
}

/// A rank reduces in the order that all have agreed on, though it completes its units in another.
TEST(StepProgram, ReductionsKeepTheOrderThatRanksAgreedOn) {
  const EngineSetting setting = sharded_on_four();
  const auto units = program_units(kUnits, setting);
  UseOrder order = declared_order(units, setting.use_from);
  order.reductions = {1, 3, 2, 0};
  const StepProgram program = step_program(units, setting, order);
  EXPECT_EQ(verdict(program), "");
  std::vector<int64_t> reduced;
  for (const Action& action : program.actions) {
    if (action.kind == ActionKind::kReduce) reduced.push_back(action.unit);
  }
  EXPECT_EQ(reduced, order.reductions);
}

TEST(StepProgram, WhatStaysInPlaceIsGatheredAfterTheUpdateAlone) {
  for_all_settings([](EngineSetting setting) {
    const int64_t before = test::planned_step(kUnits, setting).wire_bytes();
    setting.stays = true;
    const StepProgram program = test::planned_step(kUnits, setting, kActivations);
    ASSERT_EQ(verdict(program), "") << setting.policy.label();
    ASSERT_LE(program.wire_bytes(), before) << setting.policy.label();
    for (const Pass& pass : program.passes) {
      for (int64_t at = pass.begin; at < pass.end; ++at) {
        const Action& action = program.actions[static_cast<size_t>(at)];
        const bool gathers = action.kind == ActionKind::kUnshard && !action.transfers.empty();
        ASSERT_FALSE(gathers && pass.kind != Pass::Kind::kUpdate) << setting.policy.label();
      }
    }
    for (const Buffer& buffer : program.buffers) {
      const bool stays = buffer.role == Role::kParameters || buffer.role == Role::kReduced;
      ASSERT_TRUE(!stays || buffer.is_kept()) << setting.policy.label() << ": " << name(buffer.role);
    }
  });
}

/// What ranks do together must be able to leave the passes: a reduction can at the end of a step.
TEST(StepProgram, CanBeRecordedWhereRanksReduceAtItsEnd) {
  for_all_settings([](const EngineSetting& setting) {
    const std::string obstacle = recording_obstacle(test::planned_step(kUnits, setting, kActivations));
    const bool at_end = setting.reduces_once || setting.accumulation == 1;
    const bool can = setting.mesh.dp_size() == 1 ? setting.alone() : at_end;
    ASSERT_EQ(obstacle.empty(), can) << setting.policy.label() << ": " << obstacle;
  });
  EngineSetting often = sharded_on_four();
  often.reduces_once = false;
  often.accumulation = 2;
  const std::string obstacle = recording_obstacle(test::planned_step(kUnits, often));
  EXPECT_NE(obstacle.find("head for reduce of micro-batch 0"), std::string::npos) << obstacle;
  StepProgram in_fp8 = test::planned_step(kUnits, sharded_on_four());
  in_fp8.units[1].fp8.emplace();
  EXPECT_NE(recording_obstacle(in_fp8).find("all_gather of h.0"), std::string::npos);
}

struct Damage {
  const char* said;
  std::function<void(StepProgram&)> done;
};

StepProgram without(StepProgram program, ActionKind kind, const char* unit) {
  const int64_t place = place_of(program, kind, unit);
  program.actions.erase(program.actions.begin() + place);
  for (Pass& pass : program.passes) {
    pass.begin -= pass.begin > place ? 1 : 0;
    pass.end -= pass.end > place ? 1 : 0;
  }
  for (Buffer& buffer : program.buffers) {
    buffer.from -= buffer.from > place ? 1 : 0;
    buffer.to -= buffer.to >= place && !buffer.is_kept() ? 1 : 0;
  }
  for (Action& action : program.actions) action.awaits -= action.awaits > place ? 1 : 0;
  return program;
}

/// Without the reduction of a unit and the wait for it.
StepProgram without_reduction(StepProgram program, const char* unit) {
  return without(without(std::move(program), ActionKind::kWait, unit), ActionKind::kReduce, unit);
}

TEST(Verify, GradientsAreNotAddedToWhileTheyAreReduced) {
  EngineSetting often = sharded_on_four();
  often.reduces_once = false;
  often.accumulation = 2;
  const StepProgram program = test::planned_step(kUnits, often);
  ASSERT_EQ(verdict(program), "");
  EXPECT_NE(verdict(without(program, ActionKind::kWait, "h.1")).find("its gradients are still being reduced"),
            std::string::npos);
}

TEST(Verify, NamesTheFirstActionThatCannotBe) {
  const StepProgram whole = test::planned_step(kUnits, sharded_on_four(), kActivations);
  const auto swap_actions = [](StepProgram& program, int64_t a, int64_t b) {
    std::swap(program.actions[static_cast<size_t>(a)], program.actions[static_cast<size_t>(b)]);
  };
  const std::vector<Damage> damages = {
      {"parameters of h.0 have no memory here",
       [&](StepProgram& program) {
         std::erase_if(program.buffers, [](const Buffer& buffer) {
           return buffer.role == Role::kParameters && buffer.unit == 1;
         });
       }},
      {"its gradients are not complete",
       [&](StepProgram& program) {
         swap_actions(program, place_of(program, ActionKind::kBackward, "h.1"),
                      place_of(program, ActionKind::kReduce, "h.1"));
       }},
      {"it occurs twice",
       [&](StepProgram& program) {
         const int64_t reduce = place_of(program, ActionKind::kReduce, "head");
         program.actions[static_cast<size_t>(reduce) + 1] = program.actions[static_cast<size_t>(reduce)];
       }},
      {"h.1 has not been reduced before",
       [&](StepProgram& program) {
         program = without_reduction(program, "h.1");
         program = without(program, ActionKind::kUpdate, "h.1");
       }},
      {"root is never updated",
       [&](StepProgram& program) { program = without(program, ActionKind::kUpdate, "root"); }},
      {"its gradients have not been reduced",
       [&](StepProgram& program) { program = without_reduction(program, "root"); }},
      {"is no reduction of root under way",
       [&](StepProgram& program) { program = without(program, ActionKind::kReduce, "root"); }},
      {"is no reduction of h.1 under way",
       [&](StepProgram& program) {
         program.actions[static_cast<size_t>(place_of(program, ActionKind::kWait, "h.1"))].awaits = 0;
       }},
      {"nothing waits for action 21, the reduction of h.0",
       [&](StepProgram& program) { program = without(program, ActionKind::kWait, "h.0"); }},
      {"wait of h.1 in micro-batch 0: the gradients of h.1 have no memory here",
       [&](StepProgram& program) {
         const int64_t wait = place_of(program, ActionKind::kWait, "h.1");
         for (Buffer& buffer : program.buffers)
           buffer.to -= buffer.role == Role::kGradients && buffer.to == wait ? 1 : 0;
       }},
      {"exceed 64 bits",
       [](StepProgram& program) {
         program.buffers.front().bytes = program.buffers.back().bytes = std::numeric_limits<int64_t>::max();
       }},
      {"exceed 64 bits", [](StepProgram& program) { program.actions.front().transfers.front().bytes = -1; }},
      {"units are updated one by one",
       [](StepProgram& program) { program.actions.back().unit = Action::kWholeModel; }},
      {"forward of h.0 in micro-batch 0: the parameters of h.0 have not been gathered",
       [&](StepProgram& program) { program = without(program, ActionKind::kUnshard, "h.0"); }},
      {"passes cover", [&](StepProgram& program) { --program.passes.back().end; }},
      {"there are 4 units", [&](StepProgram& program) { program.actions.front().unit = 4; }},
      {"its forward pass has not run",
       [&](StepProgram& program) { program = without(program, ActionKind::kForward, "h.0"); }}};
  for (const Damage& damage : damages) {
    StepProgram damaged = whole;
    damage.done(damaged);
    const std::string said = verdict(damaged);
    EXPECT_NE(said.find(damage.said), std::string::npos) << "expected: " << damage.said << "\nsaid: " << said;
  }
}

/// That of four ranks under a policy, in fp32 and in bf16.
std::vector<StepProgram> on_four_ranks(const char* policy) {
  std::vector<StepProgram> programs;
  for (const int64_t bytes : {4, 2}) {
    programs.push_back(test::planned_step(kUnits, {.policy = find_policy(policy),
                                                   .mesh = MeshShape({1, 1, 4, 1, 1}),
                                                   .compute_bytes = bytes,
                                                   .wire_bytes = bytes}));
  }
  return programs;
}

void expect_verdict(const StepProgram& program, const std::string& wanted) {
  EXPECT_NE(verdict(program).find(wanted), std::string::npos) << wanted << "\nsaid: " << verdict(program);
}

TEST(Verify, RanksThatUpdatePartsOfWholeParametersGatherThem) {
  for (const char* policy : {"zero1", "zero2"}) {
    for (const StepProgram& program : on_four_ranks(policy)) {
      ASSERT_EQ(verdict(program), "");
      expect_verdict(without(program, ActionKind::kUnshard, "h.1"),
                     "this rank updates a part of h.1, and nothing unshards it afterwards");
    }
  }
}

TEST(Verify, ParametersThatWereUpdatedByPartsAreNotUsedBeforeTheyAreGathered) {
  StepProgram program = on_four_ranks("zero1").front();
  const int64_t unshard = place_of(program, ActionKind::kUnshard, "root");
  program.actions[static_cast<size_t>(unshard)] = {.kind = ActionKind::kForward, .unit = 0, .micro_batch = 1};
  expect_verdict(program, "the parameters of root have not been gathered");
}

TEST(Verify, RanksThatUpdateAllOfAUnitGatherItsSum) {
  for (const StepProgram& program : on_four_ranks("ddp")) {
    ASSERT_EQ(verdict(program), "");
    expect_verdict(without(program, ActionKind::kGatherSum, "h.0"),
                   "it updates 33024 of the 33024 elements of h.0, but this rank has the sum of 8256");
    StepProgram alone = program;
    for (Action& action : alone.actions) {
      if (action.kind == ActionKind::kGatherSum) action.transfers.clear();
    }
    expect_verdict(alone, "this rank has the sum of 2000");
  }
}

TEST(Verify, UpdatesNeedMastersAndMomentsThatStayFromStepToStep) {
  for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
    for (const StepProgram& program : on_four_ranks(policy)) {
      for (const Role role : {Role::kMaster, Role::kMoments}) {
        const auto is_it = [&](const Buffer& buffer) { return buffer.role == role && buffer.unit == 2; };
        StepProgram damaged = program;
        std::erase_if(damaged.buffers, is_it);
        expect_verdict(damaged, fmt::format("the {} of h.1 are not kept", role));
        damaged = program;
        Buffer& buffer = *std::ranges::find_if(damaged.buffers, is_it);
        buffer.from = buffer.to = std::ssize(damaged.actions) - 1;
        expect_verdict(damaged, fmt::format("the {} of h.1 are not kept", role));
      }
    }
  }
}

TEST(Verify, GathersNeedTheShardThatARankKeeps) {
  for (StepProgram program : on_four_ranks("fsdp")) {
    std::erase_if(program.buffers,
                  [](const Buffer& buffer) { return buffer.role == Role::kShard && buffer.unit == 1; });
    expect_verdict(program, "the shard of h.0 have no memory here");
  }
}

TEST(Verify, NoBufferIsThereTwiceAtATime) {
  for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
    for (const StepProgram& program : on_four_ranks(policy)) {
      for (const Buffer& buffer : program.buffers) {
        StepProgram damaged = program;
        damaged.buffers.push_back(buffer);
        expect_verdict(damaged, fmt::format("the {} of {} have two buffers at the same time", buffer.role,
                                            program.units[static_cast<size_t>(buffer.unit)].name));
      }
    }
  }
}

TEST(StepText, SaysWhichLineItCannotRead) {
  const std::string text = to_text(test::planned_step(kUnits, sharded_on_four()));
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string damaged = text;
    damaged.replace(damaged.find(from), from.size(), to);
    return damaged;
  };
  const std::pair<std::string, std::string> cases[] = {
      {replaced("buffer shard", "buffer sharp"), "'sharp' is not one of parameters, shard"},
      {replaced("pass forward", "pass forwards"), "'forwards' is not one of forward, backward"},
      {replaced("all_gather/4:", "all_gather:"), "write COLLECTIVE/RANKS:BYTES"},
      {replaced("kept", "keeps"), "expected 'kept' or 'from A to B'"},
      {"unit a", "it has only 2 words"},
      {"    0 compute forward a m0 - -", "an action comes before the first 'pass'"}};
  for (const auto& [damaged, said] : cases) {
    try {
      step_program_from_text(damaged);
      ADD_FAILURE() << "it was read: " << said;
    } catch (const ConfigError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(said), std::string::npos) << message;
      EXPECT_NE(message.find("line "), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace trireme::plan
