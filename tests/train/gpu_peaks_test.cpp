// Peaks of torch's allocator and of memory that GPUs share, beside those predicted: over policies, meshes,
// schedules, families and ways to compute again. One process a GPU; skipped with fewer than two GPUs.
#include <fstream>

#include "tests/train/gpu_staged_fixture.h"

namespace trireme::train {
namespace {

class GpuPeaks : public GpuRanksTest {
 public:
  struct Case {
    std::string what;
    plan::ParallelConfig parallel = {};
    plan::PipelineConfig pipeline = {};
    plan::Recompute recompute = plan::Recompute::kNone;
    plan::ModelFamily family = plan::ModelFamily::kLlama;
    plan::Dtype compute = plan::Dtype::kBf16;
    int64_t micro_batch = 4;
  };

 protected:
  void SetUp() override {
    set_up_on(2);
    if (IsSkipped()) return;
    std::ofstream text(folder_ / "text" / "long.txt");
    for (int line = 0; line < 12'000; ++line) text << "the rowers pull " << line << " strokes in time\n";
    config_.data.seq_len = 1024;
    config_.train = {.steps = 6, .global_batch = 32, .val_batches = 0, .sample_tokens = 0};
    config_.train.cuda_graphs = plan::CudaGraphs::kOff;
    config_.checkpoint.final_weights = false;
  }

  void use(const Case& given) {
    plan::ModelConfig model;
    model.family = given.family;
    model.n_layers = 6;
    model.d_model = 1536;
    model.n_heads = 12;
    model.vocab_size = 32'000;
    config_.model = plan::complete(model, config_.data.seq_len);
    config_.parallel = given.parallel;
    config_.pipeline = given.pipeline;
    config_.memory.recompute = given.recompute;
    config_.precision.compute = given.compute;
    config_.train.micro_batch = given.micro_batch;
  }

  int compare(int64_t rank, const Case& given) {
    load_kernels_at_once();
    use(given);
    const auto world = test::join_gpus(rank, 2, port_, /*timeout_s=*/60.0, {});
    train(options(), world);
    if (rank != 0) return 0;
    const auto predicted = static_cast<double>(recorder_.summary.cost.predicted_peak_bytes),
               measured = static_cast<double>(recorder_.summary.peak_bytes);
    fmt::print("{:32} predicted {:.3f} GiB, measured {:.3f} GiB, ratio {:.3f}\n", given.what,
               predicted / 0x1.0p30, measured / 0x1.0p30, predicted / measured);
    EXPECT_NEAR(predicted / measured, 1.0, 0.05) << given.what;
    return HasFailure() ? 1 : 0;
  }
};

/// Each case has processes of its own: an allocator's peak is that of all runs before.
class GpuPeaksAlone : public GpuPeaks, public ::testing::WithParamInterface<size_t> {};

const std::vector<GpuPeaks::Case>& gpu_peak_cases() {
  using plan::PolicyName;
  using plan::Recompute;
  using plan::ScheduleName;
  static const std::vector<GpuPeaks::Case> cases = {
      {"ddp", {.policy = PolicyName::kDdp}},
      {"zero1", {.policy = PolicyName::kZero1}},
      {"zero2", {.policy = PolicyName::kZero2}},
      {"fsdp", {.policy = PolicyName::kFsdp}},
      {.what = "fsdp, one micro-batch", .parallel = {.policy = PolicyName::kFsdp}, .micro_batch = 16},
      {"fsdp, blocks again", {.policy = PolicyName::kFsdp}, {}, Recompute::kBlock},
      {"fsdp, gpt2", {.policy = PolicyName::kFsdp}, {}, Recompute::kCheap, plan::ModelFamily::kGpt2},
      {.what = "zero2, fp32", .parallel = {.policy = PolicyName::kZero2}, .compute = plan::Dtype::kFp32},
      {"tp", {.tp = 2}},
      {"cp, all-to-all", {.cp = 2, .cp_kind = plan::CpKind::kUlysses}},
      {"cp, ring", {.cp = 2, .cp_kind = plan::CpKind::kRing}},
      {"pp, 1f1b", {.pp = 2}, {.schedule = ScheduleName::k1F1B}},
      {"pp, interleaved", {.pp = 2}, {.schedule = ScheduleName::kInterleaved1F1B}},
      {"pp, dualpipe, fsdp", {.policy = PolicyName::kFsdp, .pp = 2}, {.schedule = ScheduleName::kDualPipe}},
      {"pp, zb_v", {.pp = 2}, {.schedule = ScheduleName::kZbV}},
      {"pp, zb_h1, spread head", {.pp = 2}, {.schedule = ScheduleName::kZbH1, .spread_head = true}},
  };
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Train, GpuPeaksAlone, ::testing::Range(size_t{0}, gpu_peak_cases().size()));

TEST_P(GpuPeaksAlone, AreWithinFivePercentOfThosePredicted) {
  const Case& given = gpu_peak_cases()[GetParam()];
  EXPECT_EQ(test::fork_ranks(
                2, [&](int64_t rank) { return compare(rank, given); }, 60.0),
            (std::vector<int>{0, 0}))
      << given.what;
}

}  // namespace
}  // namespace trireme::train
