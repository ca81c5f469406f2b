// Programs that a run is given: what is read, and what is refused with the action that is wrong.
#include "trireme/plan/given_program.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>

#include "tests/report/temporary_folder.h"
#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/pipeline.h"

namespace trireme::plan {
namespace {

class GivenProgram : public ::testing::Test {
 protected:
  void config(std::vector<std::string> overrides, int64_t ranks) {
    overrides.push_back("model.n_layers=4");
    config_ = load({.path = "", .text = "", .overrides = std::move(overrides)}, Environment()).config;
    mesh_ = MeshShape::fit(config_.parallel, ranks);
    batch_ = plan_batch(config_, mesh_);
    facts_ = describe(config_.model, config_.data.seq_len, config_.precision, config_.memory);
  }
  /// The programs of the run, given or planned.
  std::vector<StepProgram> programs() const {
    return config_programs(config_, facts_, batch_, engine_setting(config_, mesh_, batch_.accumulation));
  }
  std::vector<StepProgram> planned() {
    config_.train.step_program.clear();
    return programs();
  }
  void give(const std::vector<StepProgram>& programs) {
    const std::string file = folder_.file("given.txt");
    std::ofstream(file) << programs_to_text(programs);
    config_.train.step_program = file;
  }
  void expect_refused(size_t rank, const std::function<void(StepProgram&)>& edit,
                      const std::vector<std::string>& words) {
    std::vector<StepProgram> edited = planned();
    edit(edited[rank]);
    give(edited);
    test::expect_refusal([&] { programs(); }, words);
  }

  TemporaryFolder folder_;
  Config config_;
  MeshShape mesh_;
  BatchPlan batch_;
  ModelFacts facts_;
};

Action& first(StepProgram& program, ActionKind kind) {
  return *std::ranges::find(program.actions, kind, &Action::kind);
}

TEST_F(GivenProgram, IsReadAsItWasPrinted) {
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    config({fmt::format("parallel.policy={}", policy), "train.global_batch=8", "train.micro_batch=1"}, 2);
    const std::vector<StepProgram> printed = planned();
    EXPECT_EQ(step_programs_from_text(programs_to_text(printed)), printed) << policy;
    give(printed);
    EXPECT_EQ(programs(), printed) << policy;
  }
  for (const ScheduleName schedule : all_values<ScheduleName>()) {
    config({"parallel.pp=2", "pipeline.micro_batches=8", fmt::format("pipeline.schedule={}", schedule)}, 4);
    const std::vector<StepProgram> printed = planned();
    EXPECT_EQ(step_programs_from_text(programs_to_text(printed)), printed) << name(schedule);
    give(printed);
    EXPECT_EQ(programs(), printed) << name(schedule);
  }
}

/// Both schedules add up micro-batches in one order.
TEST_F(GivenProgram, MayHaveTheOrderOfAnotherSchedule) {
  const auto with = [&](const char* schedule) {
    config({"parallel.pp=2", "pipeline.micro_batches=8", "pipeline.split=even",
            fmt::format("pipeline.schedule={}", schedule)},
           2);
  };
  with("gpipe");
  const std::vector<StepProgram> gpipe = planned();
  with("1f1b");
  give(gpipe);
  EXPECT_EQ(programs(), gpipe);
  EXPECT_EQ(plan_pipeline(config_, batch_).schedule.ranks, make_schedule(ScheduleName::kGpipe, {2, 8}).ranks);
}

TEST_F(GivenProgram, OfAnotherStepIsRefused) {
  config({"parallel.policy=fsdp", "train.global_batch=8", "train.micro_batch=1"}, 2);
  expect_refused(0, [](StepProgram& program) { program.units[1].numel += 8; },
                 {"rank 0", "unit 1", "elements"});
  expect_refused(0, [](StepProgram& program) { program.units[2].trainable = false; }, {"rank 0", "unit 2"});
  expect_refused(
      0, [](StepProgram& program) { first(program, ActionKind::kReduce).transfers.front().ranks = 4; },
      {"rank 0", "the sum of"});
  expect_refused(0, [](StepProgram& program) { first(program, ActionKind::kUnshard).unit = 2; },
                 {"rank 0", "action"});
  const StepProgram one = planned().front();
  give({one, one});
  test::expect_refusal([&] { programs(); }, {"programs for 2 ranks", "parallel.pp is 1", "--all-ranks"});
  config_.train.step_program = folder_.file("nowhere.txt");
  test::expect_refusal([&] { programs(); }, {"nowhere.txt", "cannot be read", "plan step"});
}

TEST_F(GivenProgram, WhoseRanksDoNotFitEachOtherIsRefused) {
  config({"parallel.pp=2", "pipeline.micro_batches=4"}, 2);
  expect_refused(1, [](StepProgram& program) { first(program, ActionKind::kRecv).buffer = 7; },
                 {"given.txt", "rank 1", "recv"});
  // Rank 1 would wait for what rank 0 sends later.
  expect_refused(0,
                 [](StepProgram& program) {
                   Action& send = first(program, ActionKind::kSend);
                   Action& later = *std::ranges::find_if(program.actions, [&](const Action& action) {
                     return action.kind == ActionKind::kSend && action.micro_batch != send.micro_batch;
                   });
                   std::swap(send.micro_batch, later.micro_batch);
                 },
                 {"given.txt"});
}

}  // namespace
}  // namespace trireme::plan
