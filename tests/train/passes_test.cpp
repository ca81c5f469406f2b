// Recorded passes with recordings that a CPU can make: what is recorded, when it is launched, and that a
// recording that fails leaves nothing behind.
#include "trireme/train/passes.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/support/tiny_training.h"
#include "trireme/plan/cuda_graphs.h"

namespace trireme::train {
namespace {

struct Counts {
  int64_t made = 0, launched = 0;
};

/// A CPU runs work when it is recorded: the first launch finds it done, later ones do it again.
class Rehearsed : public parallel::Recording {
 public:
  explicit Rehearsed(Counts& counts) : counts_(counts) { ++counts_.made; }
  void record(const std::function<void()>& work) override {
    work_ = work;
    work();
    done_ = true;
  }
  void launch() override {
    ++counts_.launched;
    if (!std::exchange(done_, false)) work_();
  }

 private:
  Counts& counts_;
  std::function<void()> work_;
  bool done_ = false;
};

struct Run {
  parallel::RecordingMaker make_recording = {};
  int64_t steps = 8;
  int64_t accumulation = 1;
  int64_t odd_step = -1;      ///< its batches have fewer sequences, or
  int64_t odd_passes = 0;     ///< it has so many of them
  bool* fails = nullptr;      ///< backward fails in the middle while this is true
  double scale_growth = 1.0;  ///< of the loss, from step to step
};

struct PassesOutcome {
  std::string digest;
  std::vector<double> losses;
  int64_t recorded = 0;
};

/// Runs `body` on one rank, with a tiny model and an engine that holds all of it.
void with_tiny_engine(
    const std::function<void(nn::Model&, parallel::DataParallel&, const plan::ModelConfig&)>& body) {
  const plan::ModelConfig config = test::tiny_model(plan::ModelFamily::kLlama);
  const plan::ModelFacts facts = plan::describe(config, 8);
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    const auto model = nn::build(config);
    parallel::DataParallel engine(*model, facts.units, comm::make_mesh(world, plan::MeshShape::fit({}, 1)),
                                  {.policy = plan::find_policy("ddp"), .average = parallel::Average::kSum},
                                  nn::InitialWeights(config, 11));
    connect(*model, engine);
    body(*model, engine, config);
  });
}

PassesOutcome train_with(const Run& run) {
  at::set_num_threads(1);
  PassesOutcome outcome;
  with_tiny_engine([&](nn::Model& model, parallel::DataParallel& engine, const plan::ModelConfig& config) {
    model.set_unit_runner(
        [&, inner = model.unit_runner()](const nn::Unit& unit, const at::Tensor& x, bool begins_pass) {
          const at::Tensor y = inner(unit, x, begins_pass);
          if (run.fails != nullptr && unit.name == model.units()[1].name && at::GradMode::is_enabled()) {
            y.register_hook([&](const at::Tensor&) {
              if (*run.fails) throw std::runtime_error("no wait\nin the middle of it");
            });
          }
          return y;
        });
    const auto optimizer = optim::build({.lr = 1e-2, .eps = 1e-5}, engine.optimizer_params());
    Passes passes(model, engine, at::kCPU,
                  {.accumulation = run.accumulation,
                   .rows = 4,
                   .step_rows = 4 * run.accumulation,
                   .make_recording = run.make_recording});
    double scale = 1.0;
    for (int64_t step = 0; step < run.steps; ++step) {
      int64_t index = 0;
      const auto next = [&] {
        const int64_t rows = step == run.odd_step && run.odd_passes == 0 ? 2 : 4;
        const int64_t passes = step == run.odd_step && run.odd_passes > 0 ? run.odd_passes : run.accumulation;
        const at::Tensor tokens =
            test::tiny_tokens(step * 10 + index++, 4, config.vocab_size).narrow(0, 0, rows);
        return data::Batch{.inputs = tokens.narrow(1, 0, 8).contiguous(),
                           .targets = tokens.narrow(1, 1, 8).contiguous(),
                           .rows = rows,
                           .step_rows = rows * passes,
                           .step_passes = passes};
      };
      outcome.losses.push_back(passes.run(next, scale).item<double>());
      engine.step_scaled(*optimizer, optim::clip_factor(engine.grad_norm(), 1.0));
      scale *= run.scale_growth;
    }
    outcome.recorded = passes.recorded();
    outcome.digest = parallel::weights_digest(engine);
  });
  return outcome;
}

parallel::RecordingMaker rehearsals(Counts& counts) {
  return [&counts] { return std::make_unique<Rehearsed>(counts); };
}

TEST(Passes, LaunchedOnesTrainTheSameBits) {
  for (const int64_t accumulation : {1, 2, 3, 4}) {
    const PassesOutcome plain = train_with({.accumulation = accumulation});
    Counts counts;
    const PassesOutcome recorded =
        train_with({.make_recording = rehearsals(counts), .accumulation = accumulation});
    EXPECT_EQ(recorded.digest, plain.digest) << accumulation;
    EXPECT_EQ(recorded.losses, plain.losses) << accumulation;
    EXPECT_EQ(recorded.recorded, std::min<int64_t>(accumulation, 3)) << "kinds of passes";
    EXPECT_EQ(counts.made, recorded.recorded) << "each is recorded once";
    EXPECT_EQ(counts.launched, (8 - plan::kStepsBeforeRecording) * accumulation);
    EXPECT_EQ(plain.recorded, 0);
  }
}

/// Trains with recordings that must be given up; what was logged.
std::string log_of(const Run& run, const PassesOutcome& plain) {
  ::testing::internal::CaptureStderr();
  const PassesOutcome outcome = train_with(run);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(outcome.digest, plain.digest);
  EXPECT_EQ(outcome.losses, plain.losses);
  EXPECT_EQ(outcome.recorded, 0);
  const size_t first = log.find("train.cuda_graphs");
  EXPECT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find("train.cuda_graphs", first + 1), std::string::npos) << "said once: " << log;
  return log;
}

TEST(Passes, AFailedRecordingLeavesTheEngineAsItWas) {
  const PassesOutcome plain = train_with({});
  /// Fails in the middle of backward, with some units reduced and others not.
  struct Failing : parallel::Recording {
    explicit Failing(bool& flag) : fails(flag) {}
    void record(const std::function<void()>& work) override {
      fails = true;
      try {
        work();
      } catch (...) {
        fails = false;
        throw;
      }
    }
    void launch() override { FAIL() << "nothing was recorded"; }
    bool& fails;
  };
  bool fails = false;
  int64_t made = 0;
  const auto maker = [&] {
    ++made;
    return std::make_unique<Failing>(fails);
  };
  const std::string log = log_of({.make_recording = maker, .fails = &fails}, plain);
  EXPECT_NE(log.find("(no wait)"), std::string::npos) << "why, in one line: " << log;
  EXPECT_EQ(made, 1) << "it is not tried again";
}

TEST(Passes, SmallerMicroBatchesRunBesideRecordings) {
  // The one that would have been recorded first, and one later on.
  for (const int64_t odd : {plan::kStepsBeforeRecording, int64_t{6}}) {
    const PassesOutcome plain = train_with({.accumulation = 2, .odd_step = odd});
    Counts counts;
    const PassesOutcome recorded =
        train_with({.make_recording = rehearsals(counts), .accumulation = 2, .odd_step = odd});
    EXPECT_EQ(recorded.digest, plain.digest) << odd;
    EXPECT_EQ(recorded.losses, plain.losses) << odd;
    EXPECT_EQ(recorded.recorded, 2) << odd;
    EXPECT_EQ(counts.launched, (8 - plan::kStepsBeforeRecording - 1) * 2) << odd;
  }
}

TEST(Passes, StepsOfFewerMicroBatchesRunBesideRecordings) {
  for (const int64_t odd : {plan::kStepsBeforeRecording, int64_t{6}}) {
    for (const int64_t passes : {1, 2}) {
      const PassesOutcome plain = train_with({.accumulation = 3, .odd_step = odd, .odd_passes = passes});
      Counts counts;
      const PassesOutcome recorded = train_with(
          {.make_recording = rehearsals(counts), .accumulation = 3, .odd_step = odd, .odd_passes = passes});
      EXPECT_EQ(recorded.digest, plain.digest) << odd;
      EXPECT_EQ(recorded.losses, plain.losses) << odd;
      EXPECT_EQ(recorded.recorded, 3) << odd;
      EXPECT_EQ(counts.launched, (8 - plan::kStepsBeforeRecording - 1) * 3) << odd;
    }
  }
}

TEST(Passes, AMicroBatchCountsByItsRows) {
  const auto losses_of = [](std::vector<int64_t> rows) {
    std::pair<double, double> found;
    with_tiny_engine([&](nn::Model& model, parallel::DataParallel& engine, const plan::ModelConfig& config) {
      Passes passes(model, engine, at::kCPU, {.accumulation = std::ssize(rows)});
      const at::Tensor tokens = test::tiny_tokens(3, 4, config.vocab_size);
      int64_t first = 0;
      size_t index = 0;
      const at::Tensor loss = passes.run(
          [&] {
            const at::Tensor part = tokens.narrow(0, std::exchange(first, first + rows[index]), rows[index]);
            return data::Batch{.inputs = part.narrow(1, 0, 8).contiguous(),
                               .targets = part.narrow(1, 1, 8).contiguous(),
                               .rows = rows[index++],
                               .step_rows = 4};
          },
          1.0);
      found = {loss.item<double>(), engine.grad_norm()};
    });
    return found;
  };
  const auto whole = losses_of({4});
  for (const std::vector<int64_t>& parts : {std::vector<int64_t>{3, 1}, {1, 2, 1}}) {
    EXPECT_NEAR(losses_of(parts).first, whole.first, 1e-6);
    EXPECT_NEAR(losses_of(parts).second, whole.second, 1e-5 * whole.second);
  }
}

TEST(Passes, AnotherScaleEndsRecordings) {
  Counts counts;
  EXPECT_NE(
      log_of({.make_recording = rehearsals(counts), .scale_growth = 0.5}, train_with({.scale_growth = 0.5}))
          .find("scale of the loss"),
      std::string::npos);
  EXPECT_EQ(counts.launched, 1);
}

}  // namespace
}  // namespace trireme::train
