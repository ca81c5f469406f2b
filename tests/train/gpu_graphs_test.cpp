// Training on one GPU: a host that runs ahead, and passes launched as CUDA graphs, change no bit of any step.
// Sequences are short enough for cuDNN's attention to repeat its bits. Skipped without a GPU.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include "tests/comm/gpu_ranks.h"
#include "tests/support/engine_on_model.h"
#include "tests/train/trainer_fixture.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/kernels/device.h"
#include "trireme/plan/cuda_graphs.h"
#include "trireme/train/passes.h"

namespace trireme::train {
namespace {

constexpr const char* kRecorded = "are recorded as CUDA graphs";

class GpuGraphs : public TrainerTest {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
    TrainerTest::SetUp();
    config_.device = plan::Device::kCuda;
    config_.precision.compute = plan::Dtype::kBf16;
    config_.train = {.steps = 14, .global_batch = 8, .val_every = 3, .val_batches = 1};
    config_.optim.lr = 1e-3;
    use_family(plan::ModelFamily::kLlama);
  }
  void TearDown() override {
    if (!folder_.empty()) TrainerTest::TearDown();
  }

  void use_family(plan::ModelFamily family, int64_t length = 64) {
    plan::ModelConfig model;
    model.family = family;
    model.n_layers = 2;
    model.d_model = 128;
    model.n_heads = 4;
    model.n_kv_heads = family == plan::ModelFamily::kLlama ? 2 : 4;
    config_.data.seq_len = length;
    config_.model = plan::complete(model, length);
  }

  /// What one GPU recorded and logged.
  struct Trained {
    Recorder recorder;
    std::string log;
    bool says(const std::string& text) const { return log.find(text) != std::string::npos; }
  };

  Trained train_on_gpu(plan::CudaGraphs cuda_graphs) {
    config_.train.cuda_graphs = cuda_graphs;
    recorder_ = {};
    const auto world = test::one_gpu();
    TrainOptions mine = options();
    mine.announce = true;
    ::testing::internal::CaptureStderr();
    try {
      train(mine, world);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    return {recorder_, ::testing::internal::GetCapturedStderr()};
  }

  void expect_equal(const Trained& got, const Trained& wanted, const std::string& what) {
    SCOPED_TRACE(what);
    expect_same_steps(got.recorder.steps, wanted.recorder.steps);
    EXPECT_EQ(got.recorder.summary.weights_digest, wanted.recorder.summary.weights_digest);
  }

  /// With and without graphs, which must have been made.
  void expect_no_bit_changes(const std::string& what) {
    const Trained without = train_on_gpu(plan::CudaGraphs::kOff), with = train_on_gpu(plan::CudaGraphs::kOn);
    EXPECT_EQ(without.recorder.steps.size(), static_cast<size_t>(config_.train.steps));
    EXPECT_FALSE(without.says(kRecorded)) << what;
    EXPECT_TRUE(with.says(kRecorded)) << what << ": " << with.log;
    expect_equal(with, without, what);
  }
};

TEST_F(GpuGraphs, AHostThatRunsAheadChangesNoBit) {
  for (const plan::CudaGraphs graphs : {plan::CudaGraphs::kOff, plan::CudaGraphs::kOn}) {
    run_ahead_ = false;
    const Trained in_step = train_on_gpu(graphs);
    run_ahead_ = true;
    expect_equal(train_on_gpu(graphs), in_step, std::string(plan::name(graphs)));
  }
}

TEST_F(GpuGraphs, ChangeNoBitOfAnyFamilyAndAccumulation) {
  for (const plan::ModelFamily family : {plan::ModelFamily::kLlama, plan::ModelFamily::kGpt2}) {
    use_family(family);
    for (const int64_t micro_batch : {8, 4, 2}) {
      config_.train.micro_batch = micro_batch;
      expect_no_bit_changes(fmt::format("{}, micro-batch {}", family, micro_batch));
    }
  }
}

/// With a GPU to itself, since it is measured how long that waits for the host.
using GpuGraphsAlone = GpuGraphs;

TEST_F(GpuGraphsAlone, AreMadeByThemselvesWhereTheDeviceIdles) {
  set_log_level(LogLevel::kDebug);  // with what the decision was made of
  const Trained tiny = train_on_gpu(plan::CudaGraphs::kAuto);
  EXPECT_TRUE(tiny.says(kRecorded)) << tiny.log;
  expect_equal(tiny, train_on_gpu(plan::CudaGraphs::kOff), "auto");
  config_.model.n_layers = 8;
  config_.model.d_model = 2048;
  config_.model.n_heads = 32;
  config_.model.n_kv_heads = 32;
  config_.model.d_ff = 8192;
  config_.train = {.steps = 6, .global_batch = 128, .val_batches = 0};
  config_.train.micro_batch = 128;
  const Trained large = train_on_gpu(plan::CudaGraphs::kAuto);
  EXPECT_FALSE(large.says(kRecorded)) << large.log;
}

TEST_F(GpuGraphs, ChangeNoBitOfFp32ThatAccumulatesInPlace) {
  use_family(plan::ModelFamily::kMlp);
  config_.precision.compute = plan::Dtype::kFp32;
  for (const int64_t micro_batch : {8, 2}) {
    config_.train.micro_batch = micro_batch;
    expect_no_bit_changes(fmt::format("micro-batch {}", micro_batch));
  }
}

TEST_F(GpuGraphs, ChangeNoBitUnderOtherSettings) {
  config_.train.micro_batch = 4;
  for (const plan::Recompute recompute : {plan::Recompute::kCheap, plan::Recompute::kBlock}) {
    config_.memory.recompute = recompute;
    expect_no_bit_changes(std::string(plan::name(recompute)));
  }
  config_.memory.recompute = plan::Recompute::kNone;
  config_.parallel.overlap = false;
  expect_no_bit_changes("without overlap");
  config_.parallel.overlap = true;
  config_.parallel.policy = plan::PolicyName::kZero2;
  config_.parallel.bucket_mib = 0.1;
  expect_no_bit_changes("buckets");
  config_.optim.name = plan::OptimizerName::kSgd;
  config_.memory.loss_chunk_mib = 1;
  expect_no_bit_changes("sgd");
}

TEST_F(GpuGraphs, DeterministicRunsOfLongSequencesAreEqual) {
  config_.train = {.steps = 6, .global_batch = 8, .val_batches = 0};
  config_.train.micro_batch = 4;
  for (const plan::ModelFamily family : {plan::ModelFamily::kLlama, plan::ModelFamily::kGpt2}) {
    use_family(family, 1024);
    for (const plan::Dtype compute : {plan::Dtype::kBf16, plan::Dtype::kFp32}) {
      config_.precision.compute = compute;
      config_.train.deterministic = true;
      const Trained first = train_on_gpu(plan::CudaGraphs::kOff);
      EXPECT_EQ(first.recorder.summary.why_bits_vary, "");
      expect_equal(train_on_gpu(plan::CudaGraphs::kOff), first, fmt::format("{} {}", family, compute));
      expect_equal(train_on_gpu(plan::CudaGraphs::kOn), first, fmt::format("{} {}, graphs", family, compute));
      config_.train.deterministic = false;
      const Trained free = train_on_gpu(plan::CudaGraphs::kOff);
      EXPECT_NE(free.recorder.summary.why_bits_vary.find("attention"), std::string::npos);
      EXPECT_TRUE(free.says("bits    may vary")) << free.log;
    }
  }
}

using GpuFp16 = GpuGraphs;

TEST_F(GpuFp16, LossesFollowThoseOfFp32) {
  for (const plan::ModelFamily family : {plan::ModelFamily::kLlama, plan::ModelFamily::kGpt2}) {
    use_family(family);
    config_.precision.compute = plan::Dtype::kFp32;
    const Trained exact = train_on_gpu(plan::CudaGraphs::kOff);
    config_.precision.compute = plan::Dtype::kFp16;
    const Trained fp16 = train_on_gpu(plan::CudaGraphs::kOff);
    ASSERT_EQ(fp16.recorder.steps.size(), exact.recorder.steps.size());
    for (size_t i = 0; i < exact.recorder.steps.size(); ++i) {
      const double wanted = exact.recorder.steps[i].loss;
      // A spacing of fp16 near 1, some ten times over: what AdamW's first steps make of small differences.
      EXPECT_NEAR(fp16.recorder.steps[i].loss, wanted, 10 * 0x1.0p-10 * wanted)
          << plan::name(family) << " step " << i + 1;
      EXPECT_FALSE(fp16.recorder.steps[i].skipped);
    }
  }
}

TEST_F(GpuFp16, StepsThatOverflowAreSkippedUntilTheScaleFits) {
  config_.precision.compute = plan::Dtype::kFp16;
  config_.precision.loss_scale.initial = 0x1.0p40;
  config_.precision.loss_scale.hysteresis = 1;
  config_.train.steps = 40;
  const Trained trained = train_on_gpu(plan::CudaGraphs::kOff);
  const std::vector<StepRecord>& steps = trained.recorder.steps;
  ASSERT_EQ(steps.size(), 40u) << trained.log;
  EXPECT_TRUE(steps.front().skipped);
  EXPECT_FALSE(steps.back().skipped) << "the scale is still " << *steps.back().loss_scale;
  for (size_t i = 1; i < steps.size(); ++i) {
    EXPECT_EQ(*steps[i].loss_scale, *steps[i - 1].loss_scale / (steps[i - 1].skipped ? 2 : 1)) << i;
    EXPECT_TRUE(std::isfinite(steps[i].loss));
  }
  EXPECT_LT(steps.back().loss, steps.front().loss);
}

/// Attention with dropout adds in an order that varies, so losses agree nearly; other random numbers would
/// show.
TEST_F(GpuGraphs, DrawTheRandomNumbersThatPassesWithoutThemDraw) {
  use_family(plan::ModelFamily::kGpt2);
  config_.model.dropout = 0.3;
  config_.train.micro_batch = 4;
  const Trained without = train_on_gpu(plan::CudaGraphs::kOff), with = train_on_gpu(plan::CudaGraphs::kOn);
  EXPECT_TRUE(with.says(kRecorded)) << with.log;
  ASSERT_EQ(with.recorder.steps.size(), without.recorder.steps.size());
  for (size_t i = 0; i < with.recorder.steps.size(); ++i) {
    const double wanted = without.recorder.steps[i].loss;
    EXPECT_NEAR(with.recorder.steps[i].loss, wanted, 2e-4 * wanted) << "step " << i + 1;
  }
}

TEST_F(GpuGraphs, AreDeclinedAloudWhereTheConfigSpeaksAgainstThem) {
  config_.precision.reduce = plan::ReduceDtype::kFp32;
  const Trained without = train_on_gpu(plan::CudaGraphs::kOff), with = train_on_gpu(plan::CudaGraphs::kOn);
  EXPECT_TRUE(with.says("train.cuda_graphs=on has no effect")) << with.log;
  EXPECT_TRUE(with.says("precision.reduce=fp32")) << with.log;
  EXPECT_FALSE(with.says(kRecorded));
  expect_equal(with, without, "declined");
}

/// Passes on one GPU whose `waits`-th computed loss waits for the device, which no recording can.
std::string digest_with_a_wait(int64_t waits, bool records, std::string& log) {
  plan::ModelConfig config;
  config.family = plan::ModelFamily::kLlama;
  config.n_layers = 2;
  config.d_model = 128;
  config.n_heads = 4;
  config.vocab_size = 512;
  config = plan::complete(config, 64);
  const plan::ModelFacts facts = plan::describe(config, 64);
  const c10::Device device(c10::kCUDA, 0);
  const c10::StreamGuard guard(parallel::recording_stream(device));
  const auto world =
      comm::World::join_store(c10::make_intrusive<c10d::HashStore>(), 0, 1, device, /*timeout_s=*/60.0);
  test::EngineOnModel trained(config, facts, world,
                              {.policy = plan::find_policy("fsdp"),
                               .compute = at::kBFloat16,
                               .reduce = at::kBFloat16,
                               .device = device},
                              /*seed=*/3);
  parallel::DataParallel& engine = trained.engine;
  const auto optimizer = optim::build({.lr = 1e-3}, engine.optimizer_params());
  constexpr int64_t kAccumulation = 3;
  int64_t computed = 0;
  trained.model->set_unit_runner(
      [&, inner = trained.model->unit_runner()](const nn::Unit& unit, const at::Tensor& x, bool begins_pass) {
        const at::Tensor y = inner(unit, x, begins_pass);
        if (unit.name == facts.units.back().name && ++computed == waits) y.sum().item();
        return y;
      });
  Passes passes(*trained.model, engine, device,
                {.accumulation = kAccumulation,
                 .rows = 4,
                 .step_rows = 4 * kAccumulation,
                 .make_recording = records ? parallel::recordings() : parallel::RecordingMaker()});
  ::testing::internal::CaptureStderr();
  for (int64_t step = 0; step < 10; ++step) {
    int64_t index = 0;
    const auto next = [&] {
      const at::Tensor tokens = (at::arange(4 * 65, at::kLong) * 7919 + (step * 10 + index++) * 31)
                                    .remainder(config.vocab_size)
                                    .view({4, 65});
      return data::Batch{.inputs = tokens.narrow(1, 0, 64).contiguous(),
                         .targets = tokens.narrow(1, 1, 64).contiguous(),
                         .rows = 4,
                         .step_rows = 4 * kAccumulation};
    };
    passes.run(next, 1.0);
    optim::GradScale scale;
    scale.device = optim::clip_factor(engine.grad_squares().sqrt(), 1.0);
    engine.step_scaled(*optimizer, scale);
  }
  log = ::testing::internal::GetCapturedStderr();
  return parallel::weights_digest(engine);
}

TEST_F(GpuGraphs, AFailedRecordingIsTakenBackWhereverItFails) {
  std::string log;
  const std::string plain = digest_with_a_wait(-1, false, log);
  EXPECT_EQ(digest_with_a_wait(-1, true, log), plain) << "none fails";
  EXPECT_EQ(log.find("train.cuda_graphs"), std::string::npos) << log;
  // Passes of the first recorded step.
  constexpr int64_t kBefore = 3 * plan::kStepsBeforeRecording;
  for (const int64_t pass : {1, 2, 3}) {
    EXPECT_EQ(digest_with_a_wait(kBefore + pass, true, log), plain) << "fails in pass " << pass;
    EXPECT_NE(log.find("train.cuda_graphs: passes cannot be recorded"), std::string::npos) << log;
  }
}

}  // namespace
}  // namespace trireme::train
