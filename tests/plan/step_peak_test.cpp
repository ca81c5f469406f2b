// The most that a rank holds at one moment, against a count of the buffers at each action.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "trireme/base/env.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/step_peak.h"

namespace trireme::plan {
namespace {

Config llama_of(const std::vector<std::string>& more) {
  std::vector<std::string> keys = {"model.preset=llama-1b", "model.n_layers=4",       "model.d_model=128",
                                   "model.n_heads=4",       "model.n_kv_heads=4",     "model.d_ff=256",
                                   "model.vocab_size=4096", "data.seq_len=128",       "train.global_batch=32",
                                   "train.micro_batch=2",   "precision.compute=bf16", "optim.lr=1e-3",
                                   "memory.recompute=none"};
  keys.insert(keys.end(), more.begin(), more.end());
  return load({.overrides = keys}, Environment()).config;
}

StepProgram program_of(const Config& config, int64_t ranks, int64_t pp_rank = 0) {
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  const BatchPlan batch = plan_batch(config, mesh);
  const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory);
  return config_program(config, facts, batch, engine_setting(config, mesh, batch.accumulation, Device::kCuda),
                        pp_rank);
}

int64_t counted_at(const StepProgram& program, int64_t action) {
  int64_t bytes = 0;
  for (const Buffer& buffer : program.buffers)
    if (!buffer.part_of && buffer.has_memory_at(action)) bytes += buffer.bytes;
  return bytes;
}

bool is_backward_of(const StepProgram& program, int64_t action, int64_t stage) {
  return std::ranges::any_of(program.passes, [&](const Pass& pass) {
    const bool backward = pass.kind == Pass::Kind::kBackward || pass.kind == Pass::Kind::kBackwardInput;
    return backward && pass.stage == stage && pass.begin <= action && action < pass.end;
  });
}

const std::vector<std::vector<std::string>> kRuns = {
    {"parallel.policy=ddp"},
    {"parallel.policy=zero1"},
    {"parallel.policy=zero2"},
    {"parallel.policy=fsdp"},
    {"parallel.policy=fsdp", "parallel.reduce_when=every_micro_batch"},
    {"parallel.pp=2", "pipeline.schedule=1f1b"},
    {"parallel.pp=2", "pipeline.schedule=zb_v"},
    {"parallel.pp=2", "pipeline.schedule=zb_h1", "pipeline.spread_head=true"}};

TEST(StepPeak, IsTheMostOfAllActionsWithWhatPassesTakeBesideTheProgram) {
  for (const std::vector<std::string>& run : kRuns) {
    const Config config = llama_of(run);
    const StepProgram program = program_of(config, 4);
    int64_t most = 0, most_in_backward = 0;
    for (int64_t at = 0; at < std::ssize(program.actions); ++at) {
      const ActionKind kind = program.actions[static_cast<size_t>(at)].kind;
      most = std::max(most, counted_at(program, at));
      if (computes(kind) && kind != ActionKind::kForward)
        most_in_backward = std::max(most_in_backward, counted_at(program, at));
    }
    const StepPeak alone = peak_of_step(program, {});
    EXPECT_EQ(alone.total(), most) << run.back();
    EXPECT_EQ(counted_at(program, alone.action), most) << run.back();
    constexpr int64_t kMuch = int64_t{1} << 40;
    EXPECT_EQ(peak_of_step(program, {.in_backward = kMuch}).total(), most_in_backward + kMuch) << run.back();
    const StepPeak decoded = peak_of_step(program, {.decoded = kMuch});
    EXPECT_EQ(decoded.decoded, kMuch) << run.back();
    EXPECT_TRUE(program.actions[static_cast<size_t>(decoded.action)].computes()) << run.back();
  }
}

/// A pool has as many pieces of a size as gradients of it are held at once, and none of another size serves.
TEST(StepPeak, HasGradientsThatArePooledAllTheTime) {
  const StepProgram program = program_of(llama_of({"parallel.policy=fsdp"}), 4);
  std::set<int64_t> sizes;
  for (const Buffer& buffer : program.buffers)
    if (buffer.role == Role::kGradients) sizes.insert(buffer.bytes);
  ASSERT_EQ(sizes.size(), 2u) << "the root and the blocks";
  int64_t pool = 0;
  for (const int64_t size : sizes) {
    int64_t most = 0;
    for (int64_t at = 0; at < std::ssize(program.actions); ++at) {
      most = std::max(most, std::ranges::count_if(program.buffers, [&](const Buffer& buffer) {
                        return buffer.role == Role::kGradients && buffer.bytes == size &&
                               buffer.has_memory_at(at);
                      }));
    }
    EXPECT_GT(most, 0);
    pool += most * size;
  }
  // Where activations are most, no pass has whole gradients in the dtype of computation.
  const StepPeak pooled = peak_of_step(program, {.pooled = Pooled::kWholeGradients});
  EXPECT_EQ(pooled.total(), peak_of_step(program, {}).total() + pool);
  EXPECT_EQ(pooled.kept, kept_bytes(program).total());
}

/// Each stage has a pool of its own, whose pieces are as large as its largest block.
TEST(StepPeak, HasAPoolOfGradientsForEachStage) {
  for (const char* vocabulary : {"model.vocab_size=4096", "model.vocab_size=512"}) {
    const StepProgram program = program_of(
        llama_of({"parallel.policy=fsdp", "parallel.pp=2", "pipeline.schedule=interleaved_1f1b", vocabulary}),
        4);
    const auto is_root = [&](int64_t unit) {
      return program.units[static_cast<size_t>(unit)].name.starts_with("root");
    };
    int64_t block = 0, pool = 0, stages = 0;
    for (const Buffer& buffer : program.buffers)
      if (buffer.role == Role::kGradients && !is_root(buffer.unit)) block = std::max(block, buffer.bytes);
    for (int64_t first = 0; first < std::ssize(program.units); ++first) {
      if (!is_root(first)) continue;
      ++stages;
      int64_t end = first + 1;
      while (end < std::ssize(program.units) && !is_root(end)) ++end;
      for (const bool larger : {false, true}) {
        int64_t most = 0, piece = block;
        for (int64_t at = 0; at < std::ssize(program.actions); ++at) {
          int64_t count = 0;
          for (const Buffer& buffer : program.buffers) {
            const bool counts = buffer.role == Role::kGradients && buffer.unit >= first &&
                                buffer.unit < end && (buffer.bytes > block) == larger &&
                                buffer.has_memory_at(at);
            if (!counts) continue;
            ++count;
            piece = std::max(piece, buffer.bytes);
          }
          most = std::max(most, count);
        }
        pool += most * piece;
      }
    }
    EXPECT_EQ(stages, 2);
    EXPECT_EQ(peak_of_step(program, {.pooled = Pooled::kWholeGradients}).total(),
              peak_of_step(program, {}).total() + pool)
        << vocabulary;
  }
}

/// A CPU's pools keep what any moment of the step took.
TEST(StepPeak, HasAllThatIsGatheredAllTheTimeOnACpu) {
  for (const std::vector<std::string>& run : kRuns) {
    const StepProgram program = program_of(llama_of(run), 4);
    const HeldBytes kept = kept_bytes(program);
    int64_t activations = 0;
    for (const HeldBytes& held : held_bytes(program))
      activations = std::max(activations, held[Role::kActivations]);
    EXPECT_EQ(peak_of_step(program, {.pooled = Pooled::kGathered}).total(),
              state_bytes(program).total() + kept[Role::kBoundary] + gathered_bytes(program) + activations)
        << run.back();
  }
}

/// The loss of a micro-batch is made in the last action of its forward pass, and what it leaves is held until
/// its backward pass begins.
TEST(StepPeak, HasTheLossOfEachMicroBatchFromItsForwardPassUntilItsBackwardPass) {
  constexpr int64_t kMuch = int64_t{1} << 40;
  for (const std::vector<std::string>& run : kRuns) {
    const Config config = llama_of(run);
    const bool staged = config.parallel.pp > 1;
    const StepProgram program = program_of(config, 4, /*pp_rank=*/0);
    for (int64_t stage = 0; stage < (staged ? 4 : 1); ++stage) {
      const StepPeak made = peak_of_step(program, {.loss_stage = stage, .loss_at_work = kMuch});
      const bool has_stage =
          std::ranges::any_of(program.passes, [&](const Pass& pass) { return pass.stage == stage; });
      EXPECT_EQ(made.for_loss, has_stage ? kMuch : 0) << run.back() << ", stage " << stage;
      if (!has_stage) continue;
      const auto at = program.actions.begin() + made.action;
      const auto pass = std::ranges::find_if(
          program.passes, [&](const Pass& one) { return one.begin <= made.action && made.action < one.end; });
      ASSERT_NE(pass, program.passes.end());
      EXPECT_EQ(pass->kind, Pass::Kind::kForward);
      EXPECT_EQ(pass->stage, stage);
      EXPECT_TRUE(at->computes());
      EXPECT_TRUE(std::none_of(at + 1, program.actions.begin() + pass->end, [](const Action& action) {
        return action.computes();
      })) << run.back();
      int64_t now = 0, in_flight = 0;
      for (const Pass& one : program.passes) {
        if (one.stage != stage) continue;
        if (one.kind == Pass::Kind::kForward) in_flight = std::max(in_flight, ++now);
        if (one.kind == Pass::Kind::kBackward || one.kind == Pass::Kind::kBackwardInput) --now;
      }
      const auto peak = [&](const BesideProgram& beside) { return peak_of_step(program, beside); };
      EXPECT_EQ(peak({.loss_stage = stage, .loss_kept = kMuch}).for_loss, in_flight * kMuch)
          << run.back() << ", stage " << stage;
      EXPECT_GE(peak({.loss_stage = stage, .activations = kMuch}).activations, in_flight * kMuch)
          << run.back() << ", stage " << stage;
      const StepPeak again = peak({.loss_stage = stage, .loss_again = kMuch});
      EXPECT_EQ(again.for_loss, kMuch);
      EXPECT_TRUE(is_backward_of(program, again.action, stage)) << run.back();
      // When the last unit's backward pass begins, the loss's has ended.
      const StepPeak backward = peak({.loss_stage = stage, .activations = kMuch, .in_backward = kMuch});
      EXPECT_EQ(backward.in_backward, kMuch);
      EXPECT_GE(backward.activations, kMuch);
      const StepPeak either = peak({.loss_stage = stage, .loss_kept = kMuch, .in_backward = kMuch});
      EXPECT_GE(either.for_loss + either.in_backward, in_flight * kMuch) << run.back() << ", stage " << stage;
      EXPECT_TRUE(staged || either.for_loss + either.in_backward == kMuch) << run.back();
    }
  }
}

}  // namespace
}  // namespace trireme::plan
