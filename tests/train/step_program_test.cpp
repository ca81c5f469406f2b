// Runs that are given the order of their step (train.step_program).
#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "tests/support/refusal.h"
#include "tests/train/staged_fixture.h"
#include "trireme/plan/given_program.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::train {
namespace {

using plan::Action;
using plan::ActionKind;
using plan::PolicyName;
using plan::ScheduleName;
using plan::StepProgram;

class StepProgramTest : public StagedTest {
 protected:
  void SetUp() override {
    StagedTest::SetUp();
    config_.train.steps = 3;
    config_.train.val_every = 0;
    config_.train.sample_tokens = 0;
    config_.pipeline.split = {.kind = plan::StageCut::Kind::kEven};
  }
  std::vector<StepProgram> programs(int64_t ranks) {
    plan::Config config = config_;
    config.train.step_program.clear();
    const plan::MeshShape mesh = plan::MeshShape::fit(config.parallel, ranks);
    const plan::BatchPlan batch = plan::plan_batch(config, mesh);
    const plan::ModelFacts facts =
        plan::describe(config.model, config.data.seq_len, config.precision, config.memory,
                       plan::TensorSplit{.ranks = config.parallel.tp});
    return plan::config_programs(config, facts, batch,
                                 plan::engine_setting(config, mesh, batch.accumulation));
  }
  void give(const std::vector<StepProgram>& programs) {
    config_.train.step_program = (folder_ / "given.txt").string();
    std::ofstream(config_.train.step_program) << plan::programs_to_text(programs);
  }
  std::string digest(int64_t pp, int64_t dp) { return outcome(pp, dp).recorder.summary.weights_digest; }
};

/// Moves an action to another place; buffers and waits keep the actions that they name.
void move_action(StepProgram& program, int64_t from, int64_t to) {
  const auto place = [&](int64_t at) {
    if (at == from) return to;
    if (from < at && at <= to) return at - 1;
    if (to <= at && at < from) return at + 1;
    return at;
  };
  const Action moved = program.actions[static_cast<size_t>(from)];
  program.actions.erase(program.actions.begin() + from);
  program.actions.insert(program.actions.begin() + to, moved);
  for (Action& action : program.actions)
    if (action.awaits >= 0) action.awaits = place(action.awaits);
  for (plan::Buffer& buffer : program.buffers) {
    if (buffer.is_kept()) continue;
    buffer.from = place(buffer.from);
    buffer.to = place(buffer.to);
  }
}

TEST_F(StepProgramTest, WhatIsPrintedTrainsTheSame) {
  for (const PolicyName policy :
       {PolicyName::kDdp, PolicyName::kZero1, PolicyName::kZero2, PolicyName::kFsdp}) {
    for (const int64_t micro_batch : {8, 4, 2, 1}) {
      config_.parallel.policy = policy;
      config_.train.micro_batch = micro_batch;
      config_.train.step_program.clear();
      const std::string planned = digest(1, 2);
      give(programs(2));
      const Outcome given = outcome(1, 2);
      const std::string what = fmt::format("{}, micro-batches of {}", policy, micro_batch);
      EXPECT_EQ(given.recorder.summary.weights_digest, planned) << what;
      const RunCost& cost = given.recorder.summary.cost;
      EXPECT_EQ(cost.measured_wire_bytes, cost.predicted_wire_bytes) << what;
    }
  }
}

TEST_F(StepProgramTest, WhatIsPrintedOfAPipelineTrainsTheSame) {
  for (const ScheduleName schedule : plan::all_values<ScheduleName>()) {
    for (const PolicyName policy : {PolicyName::kDdp, PolicyName::kFsdp}) {
      config_.parallel.policy = policy;
      config_.pipeline.schedule = schedule;
      config_.train.step_program.clear();
      config_.parallel.pp = 2;
      const std::string planned = digest(2, 2);
      give(programs(4));
      EXPECT_EQ(digest(2, 2), planned) << fmt::format("{} under {}", schedule, policy);
    }
  }
}

/// The next unit is gathered before the one in use computes, in every pass forward.
/// Backward ends at the first adapter, and some stages have none.
TEST_F(StepProgramTest, WhatIsPrintedWithAdaptersTrainsTheSame) {
  config_.model.adapter.rank = 2;
  config_.train.micro_batch = 2;
  config_.train.steps = 2;
  for (const bool tied : {false, true}) {
    config_.model.tie_embeddings = tied;
    for (const ScheduleName schedule : {ScheduleName::k1F1B, ScheduleName::kZbH1, ScheduleName::kZbV,
                                        ScheduleName::kInterleaved1F1B, ScheduleName::kDualPipeV}) {
      config_.model.adapter.kind = tied ? plan::AdapterKind::kDora : plan::AdapterKind::kLora;
      config_.pipeline.schedule = schedule;
      config_.train.step_program.clear();
      const std::string planned = digest(2, 1);
      give(programs(2));
      EXPECT_EQ(digest(2, 1), planned) << plan::name(schedule) << (tied ? ", tied" : "");
    }
  }
  config_.pipeline.schedule = ScheduleName::kGpipe;
  config_.model.n_layers = 3;
  config_.train.step_program.clear();
  const std::string planned = digest(4, 1);
  give(programs(4));
  EXPECT_EQ(digest(4, 1), planned) << "the last stage has the head alone";
}

/// The text has the sizes of the first rank along tp, which has a word more.
TEST_F(StepProgramTest, WhatIsPrintedForAnUnevenVocabularyTrainsTheSame) {
  config_.model.vocab_size = 257;
  config_.parallel.tp = 2;
  for (const int64_t pp : {1, 2}) {
    config_.train.step_program.clear();
    config_.parallel.pp = pp;
    const auto outcome_of = [&] {
      run(2 * pp);
      return recorder_.summary;
    };
    const RunSummary planned = outcome_of();
    give(programs(2 * pp));
    const RunSummary given = outcome_of();
    EXPECT_EQ(given.weights_digest, planned.weights_digest) << pp;
    EXPECT_EQ(given.cost.measured_wire_bytes, given.cost.predicted_wire_bytes) << pp;
    EXPECT_EQ(given.cost.predicted_wire_bytes, planned.cost.predicted_wire_bytes) << pp;
  }
}

TEST_F(StepProgramTest, GathersMayComeEarlier) {
  config_.parallel.policy = PolicyName::kFsdp;
  config_.train.micro_batch = 4;
  const std::string planned = digest(1, 2);
  std::vector<StepProgram> edited = programs(2);
  StepProgram& program = edited.front();
  int64_t moved = 0;
  for (const plan::Pass& pass : program.passes) {
    if (pass.kind != plan::Pass::Kind::kForward) continue;
    for (int64_t at = pass.begin + 1; at + 1 < pass.end; ++at) {
      const bool after = program.actions[static_cast<size_t>(at)].kind == ActionKind::kForward &&
                         program.actions[static_cast<size_t>(at) + 1].kind == ActionKind::kUnshard;
      if (!after) continue;
      move_action(program, at + 1, at);
      ++at;
      ++moved;
    }
  }
  EXPECT_GT(moved, 0);
  give(edited);
  EXPECT_EQ(digest(1, 2), planned);
}

/// The order of gpipe in place of that of 1F1B: the first rank has all micro-batches in flight.
TEST_F(StepProgramTest, TheOrderOfAnotherScheduleIsFollowed) {
  config_.parallel.pp = 2;
  config_.train.micro_batch = 2;  // eight a step
  config_.train.steps = 6;
  config_.train.profile_steps = 1;  // the one before is recorded
  config_.pipeline.schedule = ScheduleName::kGpipe;
  const std::vector<StepProgram> gpipe = programs(2);
  config_.pipeline.schedule = ScheduleName::k1F1B;
  const std::string planned = digest(2, 1);
  const auto most_in_flight = [](const plan::PipelineReport& report) {
    int64_t now = 0, most = 0;
    for (const plan::StageEvent& event : report.events.front()) {
      now += event.kind == plan::ActionKind::kForward    ? 1
             : event.kind == plan::ActionKind::kBackward ? -1
                                                         : 0;
      most = std::max(most, now);
    }
    return most;
  };
  EXPECT_EQ(most_in_flight(recorded_step()), 2);
  give(gpipe);
  EXPECT_EQ(digest(2, 1), planned);
  EXPECT_EQ(most_in_flight(recorded_step()), 8);
}

TEST_F(StepProgramTest, OfAnotherRunIsRefusedOnAllRanks) {
  config_.parallel.policy = PolicyName::kFsdp;
  std::vector<StepProgram> edited = programs(2);
  std::vector<Action>& actions = edited.front().actions;
  const auto reduce = std::ranges::find(actions, ActionKind::kReduce, &Action::kind);
  ASSERT_NE(reduce, actions.end());
  move_action(edited.front(), reduce - actions.begin(), 0);
  give(edited);
  test::expect_refusal([&] { run(2); }, {"given.txt"});
  config_.model.n_layers = 6;
  give(programs(2));
  config_.model.n_layers = 4;
  test::expect_refusal([&] { run(2); }, {"given.txt", "units"});
}

}  // namespace
}  // namespace trireme::train
