// The whole loop on ranks as threads, over real text on disk.
#include <chrono>
#include <cmath>
#include <csignal>
#include <thread>

#include "tests/train/trainer_fixture.h"
#include "trireme/base/error.h"
#include "trireme/kernels/repeatable.h"
#include "trireme/report/run_dir.h"

namespace trireme::train {
namespace {

TEST_F(TrainerTest, ScalingByAPowerOfTwoChangesNoBitOfTheWeights) {
  run(2);
  const std::string plain = recorder_.summary.weights_digest;
  config_.precision.scaling = plan::LossScaling::kDynamic;
  config_.precision.loss_scale.window = 7;
  run(2);
  EXPECT_EQ(recorder_.summary.weights_digest, plain);
  EXPECT_EQ(recorder_.steps.front().loss_scale, 65536.0);
  EXPECT_EQ(recorder_.steps.back().loss_scale, 65536.0 * 16.0);
}

TEST_F(TrainerTest, LearnsAndRecordsEveryStep) {
  const TrainResult result = run(2);
  ASSERT_EQ(recorder_.steps.size(), 30u);
  EXPECT_LT(recorder_.steps.back().loss, 0.7 * recorder_.steps.front().loss);
  for (size_t i = 0; i < recorder_.steps.size(); ++i) {
    const StepRecord& step = recorder_.steps[i];
    EXPECT_EQ(step.step, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(step.tokens, step.step * 8 * 32);
    EXPECT_GT(step.grad_norm, 0.0);
    EXPECT_GT(step.peak_bytes, 0);
    EXPECT_EQ(step.val_loss.has_value(), step.step % 10 == 0);
  }
  EXPECT_EQ(result.summary.steps, 30);
  EXPECT_EQ(result.summary.final_val_loss, recorder_.steps.back().val_loss);
  EXPECT_EQ(result.summary.weights_digest.size(), 16u);
  EXPECT_EQ(result.summary.sample.size(), 13u) << "the prompt and 12 bytes";
  EXPECT_EQ(recorder_.summary.weights_digest, result.summary.weights_digest);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "weights.safetensors"));
}

TEST_F(TrainerTest, TrainsOnTheTokensOfATokenizerAndSamplesItsText) {
  config_.data.tokenizer = TRIREME_TEXT_FIXTURES "/llama2.json";
  config_.model.vocab_size = 636;
  config_.train.sample_prompt = "the rowers";
  const TrainResult result = run(2);
  EXPECT_LT(recorder_.steps.back().loss, 0.8 * recorder_.steps.front().loss);
  EXPECT_TRUE(result.summary.sample.starts_with("the rowers")) << result.summary.sample;
  EXPECT_EQ(result.summary.sample.find("\u2581"), std::string::npos) << "how the file spells a space";
}

TEST_F(TrainerTest, RefusesATokenizerWithMoreTokensThanTheModel) {
  config_.data.tokenizer = TRIREME_TEXT_FIXTURES "/llama2.json";
  config_.model.vocab_size = 300;
  try {
    run(2);
    FAIL() << "it was not refused";
  } catch (const ConfigError& error) {
    for (const char* part : {"635", "model.vocab_size=300", "636"})
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST_F(TrainerTest, SamplesTextAlsoWithMoreTokensThanTheTokenizerKnows) {
  config_.model.vocab_size = 4096;
  config_.train = {.steps = 1, .global_batch = 2, .val_batches = 0, .sample_tokens = 40};
  EXPECT_EQ(run(1).summary.sample.size(), 41u) << "the prompt and 40 bytes";
}

TEST_F(TrainerTest, SameWeightsForDdpAndFsdpAndNearlySameLossForOneRank) {
  config_.parallel.policy = plan::PolicyName::kDdp;
  const TrainResult ddp = run(4);
  config_.parallel.policy = plan::PolicyName::kFsdp;
  const TrainResult fsdp = run(4);
  EXPECT_EQ(ddp.summary.weights_digest, fsdp.summary.weights_digest);
  const TrainResult one = run(1);
  EXPECT_NEAR(one.summary.final_loss, fsdp.summary.final_loss, 1e-4 * one.summary.final_loss);
  EXPECT_NEAR(*one.summary.final_val_loss, *fsdp.summary.final_val_loss, 1e-4 * *one.summary.final_val_loss);
}

TEST_F(TrainerTest, ASignalOnOneRankBeforeTheFirstStepEndsAllRanks) {
  stop_ = SIGINT;
  stop_rank_ = 1;
  const TrainResult result = run(2);
  EXPECT_EQ(result.stop_signal, SIGINT);
  EXPECT_EQ(result.summary.steps, 0);
  EXPECT_TRUE(recorder_.steps.empty());
  EXPECT_FALSE(std::filesystem::exists(folder_ / "weights.safetensors")) << "there is nothing to keep";
}

TEST_F(TrainerTest, ANonFiniteLossIsANumericsErrorThatNamesTheStep) {
  config_.optim.lr = 1e30;
  config_.train.grad_clip = 0.0;
  try {
    run(2);
    FAIL() << "a learning rate of 1e30 went unnoticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kNumerics);
    EXPECT_NE(std::string(error.what()).find("step "), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(": the gradient of transformer."), std::string::npos)
        << error.what();
  }
}

TEST_F(TrainerTest, RunningAheadChangesNoRecordAndNoWeight) {
  config_.optim.warmup_steps = 7;
  for (const int64_t micro_batch : {0, 2}) {
    config_.train.micro_batch = micro_batch;
    run_ahead_ = false;
    run(2);
    const Recorder in_step = recorder_;
    run_ahead_ = true;
    run(2);
    expect_same_steps(recorder_.steps, in_step.steps);
    EXPECT_EQ(recorder_.summary.weights_digest, in_step.summary.weights_digest);
    EXPECT_EQ(recorder_.summary.final_val_loss, in_step.summary.final_val_loss);
    EXPECT_EQ(recorder_.summary.cost.measured_wire_bytes, in_step.summary.cost.measured_wire_bytes);
  }
}

/// Also where the last step follows a validation, which leaves parameters gathered, or is the first.
TEST_F(TrainerTest, SendsInAFullStepWhatIsPredicted) {
  struct Case {
    int64_t steps, val_every;
  };
  config_.train.sample_tokens = 0;
  for (const auto policy : {plan::PolicyName::kZero1, plan::PolicyName::kZero3}) {
    config_.parallel.policy = policy;
    for (const Case& run_of : {Case{1, 0}, Case{3, 1}, Case{4, 0}}) {
      config_.train.steps = run_of.steps;
      config_.train.val_every = run_of.val_every;
      const RunCost cost = run(2).summary.cost;
      EXPECT_EQ(cost.measured_wire_bytes, cost.predicted_wire_bytes)
          << run_of.steps << " steps, validated every " << run_of.val_every;
    }
  }
}

TEST_F(TrainerTest, SendsWhatIsPredictedAlsoWhereGradientsTravelInAnotherWay) {
  struct Case {
    plan::PolicyName policy;
    plan::CommHook hook;
    plan::Reduction reduction = plan::Reduction::kOrdered;
  };
  using plan::CommHook;
  using plan::PolicyName;
  config_.train.steps = 5;
  config_.train.val_every = 0;
  config_.train.sample_tokens = 0;
  config_.parallel.local_steps = 2;
  config_.parallel.hook_start = 2;
  for (const Case& run_of :
       {Case{PolicyName::kDdp, CommHook::kFp16}, Case{PolicyName::kZero2, CommHook::kFp16},
        Case{PolicyName::kDdp, CommHook::kInt8}, Case{PolicyName::kZero3, CommHook::kInt8},
        Case{PolicyName::kDdp, CommHook::kLocalSgd}, Case{PolicyName::kDdp, CommHook::kTopK},
        Case{PolicyName::kZero3, CommHook::kTopK}, Case{PolicyName::kDdp, CommHook::kPowerSgd},
        Case{PolicyName::kZero3, CommHook::kNone, plan::Reduction::kBackend}}) {
    SCOPED_TRACE(fmt::format("{} {} {}", run_of.policy, run_of.hook, run_of.reduction));
    config_.parallel.policy = run_of.policy;
    config_.parallel.comm_hook = run_of.hook;
    config_.comm.reduction = run_of.reduction;
    const RunCost cost = run(2).summary.cost;
    EXPECT_GT(cost.measured_wire_bytes, 0);
    EXPECT_EQ(cost.predicted_wire_bytes.has_value(), !plan::starts_late(run_of.hook));
    EXPECT_EQ(cost.predicted_wire_bytes.value_or(cost.measured_wire_bytes), cost.measured_wire_bytes);
  }
}

TEST_F(TrainerTest, RunningAheadTimesStepsFromEndToEnd) {
  run_ahead_ = true;
  const TrainResult result = run(2);
  double sum_ms = 0.0;
  for (const StepRecord& step : recorder_.steps) {
    EXPECT_GT(step.step_ms, 0.0);
    EXPECT_NEAR(step.tokens_per_s * step.step_ms, 1e3 * 8 * 32, 1e-3);
    const double flops = plan::describe(config_.model, 32).flops_per_token * step.tokens_per_s;
    EXPECT_NEAR(step.tflops_per_rank, 0.5e-12 * flops, 1e-6 * step.tflops_per_rank) << "of two ranks";
    sum_ms += step.step_ms;
  }
  EXPECT_LT(sum_ms, 1e3 * result.summary.wall_s) << "no moment belongs to two steps";
  EXPECT_GT(result.summary.tokens_per_s, 0.0);
}

/// Sets the signal when it is told of `step`.
class Stopper : public Sink {
 public:
  Stopper(std::atomic<int>& stop, int64_t step) : stop_(stop), step_(step) {}
  void record(const StepRecord& record) override {
    if (record.step == step_) stop_ = SIGTERM;
  }
  void finish(const RunSummary&) override {}

 private:
  std::atomic<int>& stop_;
  int64_t step_;
};

TEST_F(TrainerTest, ASignalOnOneRankEndsAllRanksAfterTheStep) {
  stop_rank_ = 1;
  Stopper stopper(stop_, 1);
  more_sinks_ = {&stopper};
  const TrainResult result = run(2);
  EXPECT_EQ(result.stop_signal, SIGTERM);
  EXPECT_EQ(result.summary.steps, 2);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "weights.safetensors"));
  EXPECT_TRUE(recorder_.finished) << "the run directory is complete all the same";
  EXPECT_FALSE(result.summary.final_val_loss.has_value()) << "but nobody waits for a validation";
  EXPECT_TRUE(result.summary.sample.empty());
}

TEST_F(TrainerTest, WeightsAreThereBeforeTheLastValidation) {
  class Looker : public Sink {
   public:
    explicit Looker(std::filesystem::path weights) : weights_(std::move(weights)) {}
    void record(const StepRecord& step) override {
      if (step.val_loss) there.push_back(std::filesystem::exists(weights_));
    }
    void finish(const RunSummary&) override {}
    std::vector<bool> there;

   private:
    std::filesystem::path weights_;
  };
  Looker looker(folder_ / "weights.safetensors");
  more_sinks_ = {&looker};
  run(2);
  EXPECT_EQ(looker.there, (std::vector<bool>{false, false, true})) << "steps 10, 20 and 30 of 30";
}

TEST_F(TrainerTest, TheLastStepIsValidatedAndRecordedWhereWeightsCannotBeWritten) {
  config_.train.steps = 4;
  std::ofstream(folder_ / "full") << "a file where a folder should be";
  std::vector<std::string> said(2);
  test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
    TrainOptions mine = options();
    mine.weights_path = (folder_ / "full" / "weights.safetensors").string();
    try {
      train(mine, world);
    } catch (const comm::FailedElsewhere& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kEnvironment);
      said.at(static_cast<size_t>(world->rank())) = "elsewhere";
    } catch (const EnvironmentError& error) {
      said.at(static_cast<size_t>(world->rank())) = error.what();
    }
  });
  EXPECT_NE(said[0].find("full"), std::string::npos) << said[0];
  EXPECT_EQ(said[1], "elsewhere") << "rank 0 alone writes them";
  ASSERT_EQ(recorder_.steps.size(), 4u);
  EXPECT_TRUE(recorder_.steps.back().val_loss.has_value());
}

/// A validation of an hour, were it not for the signal that comes once it has begun.
TEST_F(TrainerTest, ASignalEndsAValidationAndKeepsTheWeights) {
  config_.train = {.steps = 4, .global_batch = 2, .val_every = 2, .val_batches = 1'000'000};
  config_.data.val_fraction = 0.5;
  stop_rank_ = 1;
  Stopper stopper(stop_, 1);  // rank 1 is told of it in step 2 at the earliest, which validates
  more_sinks_ = {&stopper};
  for (const bool ahead : {false, true}) {
    run_ahead_ = ahead;
    stop_ = 0;
    const TrainResult result = run(2);
    EXPECT_EQ(result.stop_signal, SIGTERM);
    EXPECT_EQ(result.summary.steps, 2);
    EXPECT_FALSE(recorder_.steps.back().val_loss.has_value());
    EXPECT_TRUE(std::filesystem::exists(folder_ / "weights.safetensors"));
    std::filesystem::remove(folder_ / "weights.safetensors");
  }
}

TEST_F(TrainerTest, ASignalEndsTheSampleAndTheRunIsCompleteAllTheSame) {
  config_.train = {.steps = 2, .global_batch = 2, .val_batches = 0, .sample_tokens = 100'000'000};
  std::jthread later([this] {
    while (!std::filesystem::exists(folder_ / "weights.safetensors")) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    stop_ = SIGINT;
  });
  const TrainResult result = run(1);
  EXPECT_EQ(result.stop_signal, SIGINT);
  EXPECT_EQ(result.summary.steps, 2);
  EXPECT_TRUE(recorder_.finished);
}

TEST_F(TrainerTest, AFullDiskUnderMetricsCostsNoStepAndNoWeight) {
  const auto directory = report::RunDirectory::create((folder_ / "runs").string(), "full", {});
  std::filesystem::create_symlink("/dev/full", directory.file("metrics.jsonl"));
  const auto files = report::make_run_files_sink(directory);
  more_sinks_ = {files.get()};
  ::testing::internal::CaptureStderr();
  const TrainResult result = run(2);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(result.summary.steps, 30);
  EXPECT_EQ(recorder_.steps.size(), 30u) << "other sinks hear of every step";
  EXPECT_TRUE(std::filesystem::exists(folder_ / "weights.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(directory.file("summary.json")));
  EXPECT_NE(log.find("step 1 is not recorded"), std::string::npos) << log;
  EXPECT_NE(log.find("metrics.jsonl: No space left on device"), std::string::npos) << log;
  EXPECT_EQ(log.find("step 2 is not recorded"), std::string::npos) << "said once: " << log;
  EXPECT_NE(log.find("30 step records could not be written"), std::string::npos) << log;
}

TEST_F(TrainerTest, ATextWhoseTokensAreBeyondTheVocabularyIsRefusedBeforeTheFirstStep) {
  config_.model.vocab_size = 200;
  try {
    run(2);
    FAIL() << "tokens up to 255 went into a model of 200";
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    for (const char* word :
         {"text", "up to 255", "model.vocab_size=200", "set model.vocab_size to at least 256"})
      EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  }
  EXPECT_TRUE(recorder_.steps.empty());
}

TEST_F(TrainerTest, AModelThatCannotFitIsOutOfMemoryWithAdvice) {
  config_.model.n_layers = 10'000;
  config_.model.d_model = 100'000;
  config_.model.n_heads = 10;
  config_.model.n_kv_heads = 0;
  config_.model.d_ff = 0;
  config_.model = plan::complete(config_.model, 32);
  try {
    run(2);
    FAIL() << "a model of petabytes was begun";
  } catch (const OutOfMemory& error) {
    const std::string message = error.what();
    for (const char* word : {"needs at least", "TiB", "this host has", "memory.recompute=cheap"})
      EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  }
}

TEST_F(TrainerTest, SaysThatNothingIsValidatedWhereTheHeldOutTextIsTooShort) {
  config_.data.val_fraction = 0.001;  // 16 of 16,320 bytes
  config_.train.steps = 2;
  ::testing::internal::CaptureStderr();
  const TrainResult result = run(2);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_FALSE(result.summary.final_val_loss.has_value());
  EXPECT_NE(log.find("validation is off"), std::string::npos) << log;
}

TEST_F(TrainerTest, MeasuresActivationsBesideThePrediction) {
  config_.train.steps = 3;
  const RunCost cost = run(2).summary.cost;
  ASSERT_TRUE(cost.measured_activation_bytes.has_value());
  EXPECT_GT(*cost.measured_activation_bytes, cost.predicted_activation_bytes) << "the loss comes on top";
  EXPECT_LT(*cost.measured_activation_bytes, 2 * cost.predicted_activation_bytes);
  config_.train.profile_steps = 1;  // the profiler listens at the same place
  EXPECT_FALSE(run(1).summary.cost.measured_activation_bytes.has_value());
}

TEST_F(TrainerTest, RecordsStepsPerSecondOfTheSameTime) {
  const TrainResult result = run(2);
  for (const StepRecord& step : recorder_.steps) EXPECT_DOUBLE_EQ(step.steps_per_s() * step.step_ms, 1e3);
  EXPECT_NEAR(result.summary.tokens_per_s, result.summary.steps_per_s * 8 * 32,
              1e-6 * result.summary.tokens_per_s);
}

TEST_F(TrainerTest, RunningAheadASignalEndsAllRanksAfterTheStepThatIsUnderWay) {
  config_.train.val_every = 0;
  stop_rank_ = 1;
  Stopper stopper(stop_, 3);
  for (const bool ahead : {false, true}) {
    run_ahead_ = ahead;
    recorder_ = {};
    stop_ = 0;
    TrainResult results[2];
    test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
      TrainOptions mine = options();
      mine.sinks.push_back(&stopper);
      mine.stop_signal = world->rank() == stop_rank_ ? &stop_ : nullptr;
      results[world->rank()] = train(mine, world);
    });
    // Ahead, step 3 is recorded when step 4 is enqueued, so the ranks hear of the signal in step 5 and read
    // that when step 6 is.
    const int64_t steps = ahead ? 6 : 4;
    for (const TrainResult& result : results) {
      EXPECT_EQ(result.stop_signal, SIGTERM);
      EXPECT_EQ(result.summary.steps, steps);
    }
    ASSERT_EQ(recorder_.steps.size(), static_cast<size_t>(steps)) << "what is under way is recorded as well";
    for (const StepRecord& step : recorder_.steps) EXPECT_FALSE(step.val_loss.has_value()) << step.step;
    EXPECT_TRUE(recorder_.finished);
  }
}

TEST_F(TrainerTest, RunningAheadAllRanksWaitWhereRankZeroProfiles) {
  config_.train.steps = 6;
  config_.train.profile_steps = 2;  // steps 5 and 6, which are never reached
  config_.train.val_every = 0;
  run_ahead_ = true;
  stop_rank_ = 1;
  Stopper stopper(stop_, 2);
  test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
    TrainOptions mine = options();
    mine.sinks.push_back(&stopper);
    mine.stop_signal = world->rank() == stop_rank_ ? &stop_ : nullptr;
    EXPECT_EQ(train(mine, world).summary.steps, 4) << "rank " << world->rank();
  });
}

TEST_F(TrainerTest, RunningAheadANonFiniteStepIsNamedAndTheLastThing) {
  config_.optim.lr = 1e30;
  config_.train.grad_clip = 0.0;
  const auto failure = [&](bool ahead) {
    run_ahead_ = ahead;
    try {
      run(2);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kNumerics);
      return std::string(error.what());
    }
    ADD_FAILURE() << "a learning rate of 1e30 went unnoticed";
    return std::string();
  };
  const std::string in_step = failure(false);
  const size_t records = recorder_.steps.size();
  const std::string ahead = failure(true);
  const auto up_to_the_loss = [](const std::string& text) { return text.substr(0, text.find(": loss")); };
  EXPECT_EQ(up_to_the_loss(ahead), up_to_the_loss(in_step)) << "the same step";
  EXPECT_EQ(recorder_.steps.size(), records) << "nothing was recorded after it";
  EXPECT_FALSE(recorder_.finished);
  for (const StepRecord& step : recorder_.steps) EXPECT_TRUE(std::isfinite(step.loss));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "weights.safetensors"));
}

TEST_F(TrainerTest, RunningAheadIsNotForScaledLosses) {
  config_.precision.scaling = plan::LossScaling::kDynamic;
  run_ahead_ = true;
  Stopper stopper(stop_, 3);
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    TrainOptions mine = options();
    mine.sinks.push_back(&stopper);
    mine.stop_signal = &stop_;
    train(mine, world);
  });
  EXPECT_EQ(recorder_.steps.size(), 4u) << "totals decide about a step, so each step's are read at once";
}

TEST_F(TrainerTest, TheSummarySaysWhetherAnEqualRunMayEndDifferently) {
  config_.train.steps = 3;
  run(2);
  EXPECT_EQ(recorder_.summary.why_bits_vary, "") << "CPUs repeat their bits";
  const std::string plain = recorder_.summary.weights_digest;
  config_.train.deterministic = true;
  run(2);
  EXPECT_EQ(recorder_.summary.why_bits_vary, "");
  EXPECT_EQ(recorder_.summary.weights_digest, plain);
  EXPECT_FALSE(kernels::must_repeat()) << "only during the run";
  config_.train.deterministic = false;
  config_.comm.reduction = plan::Reduction::kBackend;
  run(2);
  EXPECT_NE(recorder_.summary.why_bits_vary.find("Gloo chooses"), std::string::npos);
}

TEST_F(TrainerTest, GraphsOnACpuAreDeclinedAloudAndChangeNothing) {
  run(1);
  const Recorder without = recorder_;
  config_.train.cuda_graphs = plan::CudaGraphs::kOn;
  ::testing::internal::CaptureStderr();
  run(1);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("train.cuda_graphs=on has no effect: training runs on the CPU"), std::string::npos)
      << log;
  EXPECT_EQ(log.find("train.cuda_graphs", log.find("train.cuda_graphs") + 1), std::string::npos)
      << "said once: " << log;
  expect_same_steps(recorder_.steps, without.steps);
  EXPECT_EQ(recorder_.summary.weights_digest, without.summary.weights_digest);
}

TEST_F(TrainerTest, CommunicationOfEachStepIsTimedWhereThereIsSome) {
  config_.train.steps = 3;
  run(2);
  for (const StepRecord& step : recorder_.steps) {
    ASSERT_TRUE(step.communication_ms && step.exposed_ms) << step.step;
    EXPECT_GT(*step.communication_ms, 0.0);
    EXPECT_LT(*step.communication_share(), 1.0);
  }
  EXPECT_EQ(recorder_.summary.cost.communication_ms, recorder_.steps.back().communication_ms);
  run(1);
  for (const StepRecord& step : recorder_.steps) EXPECT_FALSE(step.communication_ms) << step.step;
  EXPECT_FALSE(recorder_.summary.cost.communication_ms);
}

TEST_F(TrainerTest, TheSummarySaysWhereTheWeightsAreAndWhichSignalCame) {
  config_.train.steps = 2;
  run(1);
  EXPECT_EQ(recorder_.summary.weights_path, (folder_ / "weights.safetensors").string());
  EXPECT_EQ(recorder_.summary.stop_signal, 0);
  EXPECT_GT(recorder_.summary.cost.baseline_bytes, 0);
  EXPECT_GT(recorder_.summary.cost.predicted_peak_bytes, recorder_.summary.cost.predicted.total());
  Stopper stopper(stop_, 2);
  more_sinks_ = {&stopper};
  config_.checkpoint.final_weights = false;
  config_.train.steps = 1000;
  run(1);
  EXPECT_EQ(recorder_.summary.weights_path, "");
  EXPECT_EQ(recorder_.summary.stop_signal, SIGTERM);
}

TEST_F(TrainerTest, AMissingCorpusIsAConfigErrorOfEveryRank) {
  config_.data.path = (folder_ / "nowhere").string();
  try {
    run(2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kUsage) << error.what();
  }
}

TEST_F(TrainerTest, Bf16FollowsFp32) {
  const TrainResult fp32 = run(2);
  config_.precision.compute = plan::Dtype::kBf16;
  const TrainResult bf16 = run(2);
  EXPECT_NEAR(bf16.summary.final_loss, fp32.summary.final_loss, 0.05 * fp32.summary.final_loss);
}

}  // namespace
}  // namespace trireme::train
