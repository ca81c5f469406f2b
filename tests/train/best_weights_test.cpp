// The weights of the best validation (checkpoint.best): those of one step, whatever came after it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "tests/train/trainer_fixture.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/state/state_file.h"
#include "trireme/train/best_weights.h"

namespace trireme::train {
namespace {

class BestWeightsOfARun : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    config_.train = {.steps = 8, .global_batch = 8, .val_every = 1, .val_batches = 2};
    config_.optim = {.lr = 0.2, .schedule = plan::LrSchedule::kConstant, .weight_decay = 0.0};
    config_.checkpoint.best = true;
  }

  const StepRecord& smallest_loss() const {
    return *std::ranges::min_element(recorder_.steps, {},
                                     [](const StepRecord& step) { return step.val_loss.value(); });
  }

  /// What the file's weights validate with.
  double loss_of_file() {
    config_.model.weights = options().best_weights_path;
    config_.train.steps = 1;
    config_.optim.lr = 0.0;
    config_.checkpoint.best = false;
    run(2);
    return recorder_.summary.final_val_loss.value();
  }
};

TEST_F(BestWeightsOfARun, AreThoseOfItsSmallestLoss) {
  run(2);
  const StepRecord best = smallest_loss();
  ASSERT_LT(best.step, 8);
  EXPECT_EQ(recorder_.summary.best_step, best.step);
  EXPECT_EQ(recorder_.summary.best_weights_path, options().best_weights_path);
  const state::Notes notes = state::read_notes(options().best_weights_path);
  EXPECT_EQ(notes.at("step"), std::to_string(best.step));
  EXPECT_EQ(loss_of_file(), *best.val_loss);
}

TEST_F(BestWeightsOfARun, AreAveragesWhereThoseAreValidated) {
  config_.optim.ema = 0.7;
  config_.parallel.policy = plan::PolicyName::kFsdp;
  config_.precision.compute = plan::Dtype::kBf16;
  run(2);
  const double loss = *smallest_loss().val_loss;
  EXPECT_EQ(loss_of_file(), loss);
}

TEST_F(BestWeightsOfARun, AreNeverThoseOfALossThatIsNoNumber) {
  test::run_ranks(1, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit(config_.parallel, 1));
    const plan::ModelFacts facts = plan::describe(config_.model, config_.data.seq_len);
    const plan::BatchPlan batch = plan::plan_batch(config_, mesh.shape);
    TrainedModel model({config_, facts, facts, batch, mesh});
    BestValidation note;
    BestWeights best(options().best_weights_path, /*done=*/0, mesh, {}, note);
    const auto keep = [&](int64_t step, double loss) {
      Validation found;
      found.loss = loss;
      best.keep(step, found, model);
    };
    for (const double loss : {NAN, INFINITY}) keep(1, loss);
    EXPECT_EQ(best.step(), 0);
    keep(2, 3.0);
    keep(3, NAN);
    keep(4, 4.0);
    EXPECT_EQ(best.step(), 2);
    EXPECT_EQ(state::read_notes(options().best_weights_path).at("step"), "2");
  });
}

TEST_F(BestWeightsOfARun, AreNotKeptUnlessAsked) {
  config_.checkpoint.best = false;
  run(1);
  EXPECT_EQ(recorder_.summary.best_step, 0);
  EXPECT_FALSE(std::filesystem::exists(options().best_weights_path));
}

TEST_F(BestWeightsOfARun, ThatCannotBeWrittenAreAWarning) {
  std::ofstream(folder_ / "best") << "a file where a folder should be";
  ::testing::internal::CaptureStderr();
  run(2);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("are not saved"), std::string::npos) << log;
  EXPECT_EQ(recorder_.summary.steps, 8);
  EXPECT_EQ(recorder_.summary.best_step, 0);
}

}  // namespace
}  // namespace trireme::train
