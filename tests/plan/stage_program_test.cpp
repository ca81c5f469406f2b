// Programs of ranks of a pipeline: whole and in order for every schedule and policy, counted against numbers
// that follow from the schedule.
#include "trireme/plan/stage_program.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/recompute.h"
#include "trireme/plan/step_laws.h"

namespace trireme::plan {
namespace {

struct Planned {
  Config config;
  BatchPlan batch;
  PipelinePlan pipeline;
  std::vector<StepProgram> programs;  ///< by rank of the pipeline
};

Planned plan_of(std::vector<std::string> overrides, int64_t ranks) {
  Planned planned;
  planned.config = load({.overrides = std::move(overrides)}, Environment()).config;
  const Config& config = planned.config;
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  planned.batch = plan_batch(config, mesh);
  planned.pipeline = plan_pipeline(config, planned.batch);
  const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory);
  const EngineSetting setting = engine_setting(config, mesh, planned.batch.accumulation);
  for (int64_t rank = 0; rank < config.parallel.pp; ++rank)
    planned.programs.push_back(config_program(config, facts, planned.batch, setting, rank));
  return planned;
}

int64_t count(const StepProgram& program, ActionKind kind) {
  return std::ranges::count(program.actions, kind, &Action::kind);
}

TEST(StageProgram, IsWholeForEveryScheduleAndPolicy) {
  for (const ScheduleName schedule : all_values<ScheduleName>()) {
    for (const char* policy : {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"}) {
      for (const char* compute : {"fp32", "bf16"}) {
        for (const char* tied : {"true", "false"}) {
          const Planned planned = plan_of(
              {"parallel.pp=2", "pipeline.micro_batches=8", "model.n_layers=6",
               fmt::format("pipeline.schedule={}", schedule), fmt::format("parallel.policy={}", policy),
               fmt::format("precision.compute={}", compute), fmt::format("model.tie_embeddings={}", tied)},
              4);
          for (const StepProgram& program : planned.programs) {
            EXPECT_NO_THROW(verify(program))
                << fmt::format("{}, {}, {}, tied {}", schedule, policy, compute, tied);
            EXPECT_EQ(step_program_from_text(to_text(program)), program);
          }
        }
      }
    }
  }
}

TEST(StageProgram, IsWholeWithAHeadThatIsSpread) {
  for (const ScheduleName schedule : all_values<ScheduleName>()) {
    if (schedule == ScheduleName::kDualPipe) continue;
    for (const char* policy : {"ddp", "zero1", "fsdp"}) {
      for (const bool tied : {false, true}) {
        const Planned planned = plan_of(
            {"parallel.pp=2", "pipeline.micro_batches=8", "model.n_layers=6",
             fmt::format("model.tie_embeddings={}", tied), "pipeline.spread_head=true",
             fmt::format("pipeline.schedule={}", schedule), fmt::format("parallel.policy={}", policy)},
            4);
        for (const StepProgram& program : planned.programs) {
          EXPECT_NO_THROW(verify(program)) << fmt::format("{}, {}, tied {}", schedule, policy, tied);
          EXPECT_EQ(step_program_from_text(to_text(program)), program);
          const auto of_head = std::ranges::count_if(
              program.units, [](const ProgramUnit& unit) { return unit.name.starts_with("head of rank"); });
          EXPECT_EQ(of_head, 1);
        }
      }
    }
  }
}

/// Stages with copies of tied embeddings reduce when both have been summed, behind all passes: the first one
/// and all parts of a head that is spread, and no other.
TEST(StageProgram, StagesWithCopiesReduceBehindAllPasses) {
  const auto reductions = [](bool tied, bool spread) {
    const Planned planned = plan_of(
        {"parallel.pp=4", "pipeline.micro_batches=8", "model.n_layers=8", "pipeline.schedule=1f1b",
         fmt::format("model.tie_embeddings={}", tied), fmt::format("pipeline.spread_head={}", spread)},
        8);
    std::vector<int64_t> passes;
    for (const StepProgram& program : planned.programs)
      passes.push_back(std::ranges::count(program.passes, Pass::Kind::kReduce, &Pass::kind));
    return passes;
  };
  EXPECT_EQ(reductions(false, false), (std::vector<int64_t>{0, 0, 0, 0}));
  EXPECT_EQ(reductions(true, false), (std::vector<int64_t>{1, 0, 0, 1}));
  EXPECT_EQ(reductions(false, true), (std::vector<int64_t>{0, 0, 0, 0}));
  EXPECT_EQ(reductions(true, true), (std::vector<int64_t>{2, 1, 1, 1}));
}

/// A copy has 256 rows of width 128 in fp32. Two ranks add up two copies by sending each other all of them.
TEST(StageProgram, SumsTheGradientsOfCopiesBeforeTheyAreReduced) {
  const auto sent = [](const std::string& more, const char* schedule = "1f1b") {
    const Planned planned = plan_of({"parallel.pp=4", "pipeline.micro_batches=8", "model.n_layers=8",
                                     fmt::format("pipeline.schedule={}", schedule), more},
                                    8);
    std::vector<std::vector<int64_t>> bytes;
    for (const StepProgram& program : planned.programs) {
      bytes.emplace_back();
      const auto sum = std::ranges::find(program.actions, ActionKind::kSumTied, &Action::kind);
      if (sum == program.actions.end()) continue;
      EXPECT_EQ(count(program, ActionKind::kSumTied), 1);
      bytes.back().push_back(0);
      for (const Transfer& transfer : sum->transfers) bytes.back().push_back(transfer.bytes);
    }
    return bytes;
  };
  using Sent = std::vector<std::vector<int64_t>>;
  const int64_t row = 128 * 4;
  EXPECT_EQ(sent("model.tie_embeddings=false"), (Sent{{}, {}, {}, {}}));
  EXPECT_EQ(sent("model.tie_embeddings=true"), (Sent{{0, 256 * row}, {}, {}, {0, 256 * row}}));
  EXPECT_EQ(sent("precision.compute=bf16"), (Sent{{0, 256 * row}, {}, {}, {0, 256 * row}}))
      << "micro-batches are added up in fp32";
  EXPECT_EQ(sent("model.tie_embeddings=true", "zb_v"), (Sent{{0}, {}, {}, {}})) << "one rank has both";
  const Sent parts = sent("pipeline.spread_head=true");
  ASSERT_EQ(parts[0].size(), 4u) << "rank 0 has a part itself";
  int64_t of_parts = 0;
  for (size_t rank = 1; rank < 4; ++rank) {
    ASSERT_EQ(parts[rank].size(), 2u);
    EXPECT_EQ(parts[0][rank], parts[rank][1]);
    of_parts += parts[rank][1];
  }
  EXPECT_GT(of_parts, 128 * row);
  EXPECT_LT(of_parts, 256 * row);
}

TEST(StageProgram, TheVerifierWantsTheSumOfCopiesOnceAndInItsTurn) {
  const StepProgram whole = plan_of({"parallel.pp=2", "pipeline.micro_batches=4"}, 2).programs.front();
  const auto pass = std::ranges::find(whole.passes, Pass::Kind::kSumTied, &Pass::kind);
  ASSERT_NE(pass, whole.passes.end());
  const auto at = pass - whole.passes.begin();
  const auto refused =
      [&](const std::function<void(std::vector<std::pair<Pass, std::vector<Action>>>&)>& edit,
          const std::vector<std::string>& words) {
        StepProgram program = whole;
        std::vector<std::pair<Pass, std::vector<Action>>> passes;
        for (const Pass& one : whole.passes)
          passes.emplace_back(
              one, std::vector(whole.actions.begin() + one.begin, whole.actions.begin() + one.end));
        edit(passes);
        program.actions.clear();
        program.passes.clear();
        std::erase_if(program.buffers, [](const Buffer& buffer) { return !buffer.is_kept(); });
        for (auto& [one, actions] : passes) {
          one.begin = std::ssize(program.actions);
          program.actions.insert(program.actions.end(), actions.begin(), actions.end());
          one.end = std::ssize(program.actions);
          program.passes.push_back(one);
        }
        test::expect_refusal([&] { check_step_laws(program); }, words);
      };
  refused([&](auto& passes) { passes.erase(passes.begin() + at); },
          {"reduce of root of stage 0", "nothing has summed"});
  refused([&](auto& passes) { passes.insert(passes.begin() + at, passes[at]); },
          {"sum_tied", "it occurs twice"});
  refused([&](auto& passes) { std::swap(passes[at], passes[at + 1]); },
          {"reduce of root of stage 0", "nothing has summed"});
  refused([&](auto& passes) { std::swap(passes[at], passes[at - 1]); },
          {"behind one that sums", "behind all passes"});
  refused(
      [&](auto& passes) { passes[at].second.front().transfers.front().collective = Collective::kAllGather; },
      {"sum_tied", "all_reduce/2"});
  refused(
      [&](auto& passes) {
        passes[at + 1].second.insert(passes[at + 1].second.begin(), passes[at].second.front());
      },
      {"sum_tied", "belongs to a sum_tied pass"});
}

TEST(StageProgram, HoldsActivationsOfAsManyMicroBatchesAsTheSchedule) {
  for (const ScheduleName schedule : {ScheduleName::kGpipe, ScheduleName::k1F1B}) {
    const Planned planned = plan_of({"parallel.pp=4", "pipeline.micro_batches=8", "model.n_layers=8",
                                     "pipeline.split=even", fmt::format("pipeline.schedule={}", schedule)},
                                    4);
    for (size_t rank = 0; rank < 4; ++rank) {
      const StepProgram& program = planned.programs[rank];
      int64_t of_micro_batch = 0, most = 0;
      for (const ProgramUnit& unit : program.units) of_micro_batch += unit.activation_bytes;
      for (const HeldBytes& held : held_bytes(program)) most = std::max(most, held[Role::kActivations]);
      const int64_t wanted = schedule == ScheduleName::kGpipe ? 8 : 4 - static_cast<int64_t>(rank);
      EXPECT_EQ(most, wanted * of_micro_batch) << name(schedule) << ", rank " << rank;
    }
  }
}

/// GPT-2, 2 sequences of 128 tokens of width 128 in fp32: a block that is computed again keeps its input, d,
/// and between both halves of backward the inputs of its four layers, d d d 4d, and the gradients of their
/// outputs, 3d d 4d d. That of the last block's output is in a receive buffer; the output itself is kept for
/// backward.
TEST(StageProgram, HoldsMoreBetweenBothHalvesOfBackwardThanBefore) {
  const int64_t d = 2 * 128 * 128 * 4;
  for (const char* recompute : {"none", "block"}) {
    const Planned planned =
        plan_of({"parallel.pp=2", "pipeline.micro_batches=8", "model.n_layers=4", "pipeline.split=even",
                 "pipeline.schedule=zb_h1", fmt::format("memory.recompute={}", recompute)},
                2);
    const StepProgram& first = planned.programs[0];
    int64_t between = 0, before = 0;
    for (const ProgramUnit& unit : first.units) {
      between += unit.between_halves_bytes;
      before += unit.activation_bytes;
    }
    EXPECT_EQ(between, (2 * 16 - 1) * d) << recompute;
    if (std::string_view(recompute) == "block") {
      EXPECT_EQ(before, (2 + 1) * d);
    }
    const std::vector<HeldBytes> held = held_bytes(first);
    const auto left = std::ranges::find(first.passes, Pass::Kind::kBackwardInput, &Pass::kind);
    int64_t under_way = 0;
    for (auto pass = first.passes.begin(); pass != left; ++pass)
      under_way += pass->kind == Pass::Kind::kForward;
    EXPECT_EQ(held[static_cast<size_t>(left->end)][Role::kActivations], between + (under_way - 1) * before)
        << recompute;
  }
}

/// 8 micro-batches of 2 sequences of 128 tokens of width 128 in fp32.
TEST(StageProgram, SendsABoundaryForEachMicroBatchAndStage) {
  const Planned planned = plan_of({"parallel.pp=2", "pipeline.micro_batches=8"}, 2);
  const int64_t boundary = 2 * 128 * 128 * 4;
  for (const StepProgram& program : planned.programs) {
    EXPECT_EQ(count(program, ActionKind::kSend), 8);
    EXPECT_EQ(count(program, ActionKind::kRecv), 8);
    EXPECT_EQ(program.wire_bytes(8), 8 * boundary + 256 * 128 * 4)
        << "and the gradients of its copy of the embeddings, nothing else: a stage has one rank";
    EXPECT_EQ(kept_bytes(program)[Role::kBoundary] % boundary, 0);
    EXPECT_GT(kept_bytes(program)[Role::kBoundary], 0);
  }
}

TEST(StageProgram, ReducesMeanwhileWhereTheLastBackwardPassCompletesGradients) {
  const auto reducing = [](std::vector<std::string> overrides) {
    overrides.emplace_back("parallel.pp=2");
    overrides.emplace_back("pipeline.micro_batches=8");
    const Planned planned = plan_of(overrides, 4);
    std::vector<bool> behind;
    for (const StepProgram& program : planned.programs)
      behind.push_back(std::ranges::any_of(
          program.passes, [](const Pass& pass) { return pass.kind == Pass::Kind::kReduce; }));
    return behind;
  };
  using Behind = std::vector<bool>;
  EXPECT_EQ(reducing({"model.tie_embeddings=false"}), (Behind{false, false}));
  EXPECT_EQ(reducing({"model.tie_embeddings=true"}), (Behind{true, true}));
  EXPECT_EQ(reducing({"model.tie_embeddings=false", "pipeline.schedule=zb_h1"}), (Behind{true, true}));
}

TEST(StageProgram, OfAPipelineIsCountedByItsLargestRank) {
  const Planned planned = plan_of({"parallel.pp=2", "pipeline.micro_batches=8"}, 2);
  const std::vector<RankBytes> all = bytes_by_pp_rank(planned.config, 2, Device::kCpu);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].logits, 0) << "the head is elsewhere";
  EXPECT_GT(all[1].logits, 0);
  // Logits of a micro-batch wait for its backward pass.
  const auto logits_of = [&](const char* schedule, Device device) {
    const Planned of = plan_of({"parallel.pp=2", "pipeline.micro_batches=8", "model.vocab_size=32000",
                                fmt::format("pipeline.schedule={}", schedule)},
                               2);
    return bytes_by_pp_rank(of.config, 2, device)[1].logits;
  };
  EXPECT_EQ(logits_of("gpipe", Device::kCpu), 8 * logits_of("1f1b", Device::kCpu));
  EXPECT_EQ(logits_of("gpipe", Device::kCuda) - logits_of("1f1b", Device::kCuda),
            7 * (2 * 128 + 32000) * 128 * 4);
  EXPECT_EQ(rank_bytes(planned.config, 2, Device::kCpu).peak(), std::max(all[0].peak(), all[1].peak()));
  const Planned large = plan_of({"parallel.pp=2", "pipeline.micro_batches=8", "model.preset=llama-1b",
                                 "data.seq_len=4096", "precision.compute=bf16"},
                                2);
  const Config settled = settle_recompute(large.config, Device::kCuda);
  ASSERT_EQ(large.config.memory.recompute, Recompute::kAuto);
  ASSERT_EQ(settled.memory.recompute, Recompute::kCheap);
  EXPECT_EQ(bytes_by_pp_rank(large.config, 2, Device::kCuda)[1].activations,
            bytes_by_pp_rank(settled, 2, Device::kCuda)[1].activations);
  Config whole = planned.config;
  whole.parallel.pp = 1;
  whole.parallel.policy = PolicyName::kDdp;
  const int64_t in_one = rank_bytes(whole, 1, Device::kCpu).state.optimizer;
  const int64_t tied = 2 * 4 * planned.config.model.vocab_size * planned.config.model.d_model;
  EXPECT_NEAR(static_cast<double>(all[0].state.optimizer + all[1].state.optimizer - tied),
              static_cast<double>(in_one), 1e4)
      << "stages share the moments, but for a copy of the embeddings";
}

TEST(StageProgram, TheVerifierFindsASendOfWhatWasNotComputed) {
  StepProgram program = plan_of({"parallel.pp=2", "pipeline.micro_batches=4"}, 2).programs.front();
  const auto send = std::ranges::find(program.actions, ActionKind::kSend, &Action::kind);
  ASSERT_NE(send, program.actions.end());
  send->micro_batch = 3;
  test::expect_refusal([&] { verify(program); }, {"send", "micro-batch 3", "not computed anything to send"});
}

}  // namespace
}  // namespace trireme::plan
