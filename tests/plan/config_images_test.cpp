// Configs of models that read images, and files in the words of other trainers.
#include <gtest/gtest.h>

#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/stages.h"
#include "trireme/plan/vision_model.h"

namespace trireme::plan {
namespace {

ResolvedConfig load_text(const std::string& text, std::vector<std::string> overrides = {}) {
  return load({.path = {}, .text = text, .overrides = std::move(overrides)}, Environment());
}

TEST(ImageConfig, AModelSaysWhatIsRead) {
  const ResolvedConfig resolved = load_text("model:\n  preset: resnet18-cifar\n");
  EXPECT_EQ(resolved.config.data.kind, DataKind::kImages);
  EXPECT_EQ(resolved.origins.at("data.kind"), "derived: model.family");
  EXPECT_EQ(resolved.config.data.seq_len, 1);
  EXPECT_EQ(resolved.config.model.vocab_size, 10);
  EXPECT_EQ(resolved.config.model.n_layers, 8);
  EXPECT_EQ(resolved.config.model.d_model, 512);
  EXPECT_EQ(load_text("model:\n  preset: gpt-tiny\n").config.data.kind, DataKind::kText);
}

TEST(ImageConfig, ComesBackFromItsYaml) {
  const ResolvedConfig resolved = load_text(
      "model:\n  preset: small-resnet20\n  norm: group\n  label_smoothing: 0.1\ndata:\n  pad: 4\n"
      "train:\n  epochs: 3\n");
  const ResolvedConfig again = load_text(to_yaml(resolved));
  EXPECT_EQ(to_yaml(again), to_yaml(resolved));
  EXPECT_TRUE(differing_keys(again.config, resolved.config).empty());
  EXPECT_EQ(again.config.model.vision.norm, ImageNorm::kGroup);
  EXPECT_EQ(again.config.train.epochs, 3);
}

TEST(ImageConfig, PredictsMemoryAsOfAnyModel) {
  const Config config = load_text("model:\n  preset: resnet18-cifar\ntrain:\n  global_batch: 64\n").config;
  const RankBytes bytes = rank_bytes(config, 1, Device::kCpu);
  EXPECT_NEAR(static_cast<double>(bytes.state.parameters), 4.0 * 11'173'962, 1000.0) << "padding of units";
  EXPECT_EQ(bytes.activations,
            static_cast<int64_t>(64 * describe(config.model.vision).saved_bytes_per_image));
  EXPECT_LT(rank_bytes(config, 4, Device::kCpu).state.total(), bytes.state.total());
}

/// A GPU keeps weights of convolutions in another layout for each micro-batch, of any size.
TEST(ImageConfig, PredictsWhatEachMicroBatchInFlightKeepsOnAGpu) {
  const auto more_on_gpu = [](const std::string& text) {
    const Config config =
        load_text("model:\n  preset: resnet18-cifar\nprecision:\n  compute: bf16\n" + text).config;
    const int64_t ranks = config.parallel.pp;
    const auto on_gpu = bytes_by_pp_rank(config, ranks, Device::kCuda),
               on_cpu = bytes_by_pp_rank(config, ranks, Device::kCpu);
    std::vector<int64_t> more;
    for (size_t rank = 0; rank < on_gpu.size(); ++rank)
      more.push_back(on_gpu[rank].activations - on_cpu[rank].activations);
    return more;
  };
  constexpr int64_t kTurned = 2 * 10'987'200;
  EXPECT_EQ(more_on_gpu("train:\n  global_batch: 64\n"), std::vector<int64_t>{kTurned});
  for (const int64_t micro_batch : {1, 8}) {
    const auto more = more_on_gpu(
        fmt::format("train:\n  global_batch: 64\n  micro_batch: {}\nparallel:\n  pp: 2\n", micro_batch));
    EXPECT_EQ(more[0] / 2 + more[1], kTurned) << "the first rank of two has two in flight";
  }
}

/// Of C channels a row of 2 C + 1 fp64 numbers for each other rank forward, and 2 C fp32 sums backward.
TEST(ImageConfig, NormsOverRanksAreCountedOnTheWire) {
  const auto sent = [](const std::string& norm, const std::string& more, int64_t ranks, Device device) {
    const Config config = load_text("model:\n  family: resnet\n  depth: 8\n  width: 8\n  norm: " + norm +
                                    "\ntrain:\n  global_batch: 48\n  micro_batch: 4\n" + more)
                              .config;
    const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
    const BatchPlan batch = plan_batch(config, mesh);
    const ModelFacts facts = describe(config.model, 1, config.precision, config.memory);
    const StepProgram program =
        config_program(config, facts, batch, engine_setting(config, mesh, batch.accumulation, device));
    EXPECT_NO_THROW(verify(program));
    return program.wire_bytes(batch.accumulation);
  };
  const auto of_norms = [&](const std::string& more, int64_t ranks, Device device = Device::kCpu) {
    return sent("sync_batch", more, ranks, device) - sent("batch", more, ranks, device);
  };
  constexpr int64_t kChannels = 21 * 8, kNorms = 9;
  constexpr int64_t kRows = 8 * (2 * kChannels + kNorms), kSums = 8 * kChannels;
  EXPECT_EQ(of_norms("", 1), 0);
  EXPECT_EQ(of_norms("", 2), 6 * (kRows + kSums)) << "six micro-batches";
  EXPECT_EQ(of_norms("parallel:\n  policy: ddp\n  bucket_mib: 1\n", 2), 6 * (kRows + kSums));
  EXPECT_EQ(of_norms("", 3), 4 * 2 * (kRows + kSums)) << "read in the memory of two others";
  EXPECT_EQ(of_norms("comm:\n  peer_memory: false\n", 4), 3 * (3 * kRows + 3 * kSums / 2)) << "a ring";
  EXPECT_EQ(of_norms("", 4, Device::kCuda), 3 * (3 * kRows + 3 * kSums / 2));
  const int64_t stem = 8 * (2 * 8 + 1);
  EXPECT_EQ(of_norms("memory:\n  recompute: block\n", 2), 6 * (2 * kRows - stem + kSums));
  const int64_t first = of_norms("parallel:\n  pp: 2\n  policy: ddp\n", 4);
  EXPECT_GT(first, 0);
  EXPECT_LT(first, 6 * (kRows + kSums)) << "of the norms of the first stage";
}

struct Refused {
  const char *text, *said;
};

TEST(ImageConfig, RefusesWhatBelongsToTheOtherKind) {
  const Refused all[] = {
      {"model:\n  preset: lenet\ndata:\n  kind: text\n", "which implies images"},
      {"data:\n  kind: images\n", "which implies text"},
      {"model:\n  preset: lenet\ndata:\n  seq_len: 128\n", "data.seq_len=128"},
      {"model:\n  preset: lenet\n  vocab_size: 256\n", "which implies 10"},
      {"model:\n  preset: lenet\n  rope_factor: 2\n", "model.rope_factor=2"},
      {"model:\n  depth: 50\n", "is for image models"},
      {"data:\n  flip: true\n", "is for image models"},
      {"model:\n  preset: lenet\ndata:\n  least_area: 0.5\n", "without data.resized_crop"},
      {"model:\n  preset: lenet\nparallel:\n  pp: 2\npipeline:\n  spread_head: true\n", "cannot be spread"},
      {"model:\n  preset: lenet\npipeline:\n  spread_head: true\n", "cannot be spread"},
      {"model:\n  preset: resnet18\nparallel:\n  pp: 2\npipeline:\n  schedule: dualpipe\n",
       "running statistics"},
      {"model:\n  preset: lenet\ntrain:\n  sample_tokens: 5\n", "generates no text"},
      {"model:\n  preset: lenet\nmemory:\n  recompute: cheap\n", "nothing to recompute"},
      {"model:\n  preset: lenet\nmemory:\n  recompute: all_but_attention\n", "no attention"},
      {"model:\n  preset: gpt-tiny\n  dropout: 0.1\nmemory:\n  recompute: all_but_attention\n", "dropout"},
      {"model:\n  family: resnet\n  depth: 21\n", "model.depth=21"},
      {"model:\n  preset: small-resnet20\n  norm: group\n  norm_groups: 5\n", "model.norm_groups=5"}};
  for (const Refused& one : all) {
    SCOPED_TRACE(one.text);
    test::expect_refusal([&] { load_text(one.text); }, {one.said});
  }
}

TEST(ImageConfig, StagesShareOutWhatUnitsCost) {
  const Config config = load_text("model:\n  preset: resnet18-cifar\n").config;
  const ModelFacts facts = describe(config.model, 1);
  const auto parts = stage_parts(config.model, facts, false, CutAt::kHalves);
  ASSERT_EQ(parts.size(), 9u) << "eight blocks, the first with the stem, and the head";
  double flops = 0.0;
  for (const StagePart& part : parts) flops += part.flops;
  EXPECT_EQ(3.0 * flops, facts.flops_per_token);
  const StageSplit split = split_by_cost(parts, 2);
  EXPECT_NEAR(split.shares().front(), 0.5, 0.07);
  double saved = 0.0;
  for (const int64_t stage : {0, 1}) {
    for (const UnitSpec& unit : stage_units(config.model, facts, units_of_stage(split, stage)))
      saved += unit.image.saved_bytes;
  }
  EXPECT_EQ(saved, facts.saved_bytes_per_token);
  const auto units = stage_units(config.model, facts, units_of_stage(split, 1));
  for (const BufferSpec& buffer : buffers_of(config.model.vision, units))
    EXPECT_TRUE(buffer.name.starts_with("layer3") || buffer.name.starts_with("layer4")) << buffer.name;
}

TEST(ImageConfig, BatchesOfRanksGrowWithThem) {
  const Config config = load_text("train:\n  rank_batch: 32\n  micro_batch: 8\n").config;
  for (const int64_t ranks : {1, 2, 4}) {
    const BatchPlan batch = plan_batch(config, MeshShape::fit(config.parallel, ranks));
    EXPECT_EQ(batch.global_batch, 32 * ranks);
    EXPECT_EQ(batch.accumulation, 4);
  }
}

/// As the files of a small laboratory for CIFAR-10 with PyTorch have it.
constexpr const char* kOfTheLab =
    "model:\n"
    "  name: \"small_resnet\"\n"
    "  num_layers: 18\n"
    "training:\n"
    "  batch_size: 128\n"
    "  num_epochs: 10\n"
    "  learning_rate: 0.1\n"
    "  optimizer: \"sgd\"\n";

TEST(ConfigAliases, FilesOfOthersAreReadAsTheyAre) {
  const ResolvedConfig resolved = load_text(kOfTheLab);
  const Config& config = resolved.config;
  EXPECT_EQ(config.model.family, ModelFamily::kResNet);
  EXPECT_EQ(config.model.vision.depth, 18);
  EXPECT_EQ(config.train.rank_batch, 128);
  EXPECT_EQ(config.train.epochs, 10);
  EXPECT_EQ(config.optim.lr, 0.1);
  EXPECT_EQ(config.optim.name, OptimizerName::kSgd);
  EXPECT_EQ(resolved.origins.at("optim.lr"), "<text>:7:3 training.learning_rate");
  const Config sharded =
      load_text(std::string(kOfTheLab) + "fsdp:\n  sharding_strategy: SHARD_GRAD_OP\n").config;
  EXPECT_EQ(sharded.parallel.policy, PolicyName::kFsdp);
  EXPECT_EQ(sharded.parallel.sharding, Sharding::kShardGradOp);
  EXPECT_EQ(load_text(kOfTheLab, {"optim.lr=0.2"}).config.optim.lr, 0.2)
      << "the command line has the last word";
  EXPECT_EQ(load_text(kOfTheLab, {"training.learning_rate=0.2"}).config.optim.lr, 0.2);
  EXPECT_EQ(load_text("model:\n  name: resnet18-cifar\n").config.model.vision.width, 64);
}

TEST(ConfigAliases, UnknownKeysAreLookedForInBothVocabularies) {
  test::expect_refusal([] { load_text("training:\n  learning_rat: 0.1\n"); },
                       {"did you mean 'learning_rate'"});
  test::expect_refusal([] { load_text("train:\n  epoch: 3\n"); }, {"did you mean 'epochs'"});
  test::expect_refusal([] { load_text("model:\n  num_layer: 18\n"); }, {"did you mean 'num_layers'"});
  test::expect_refusal([] { load_text("training:\n  optimizer: lamb\n"); }, {"training.optimizer", "adamw"});
}

}  // namespace
}  // namespace trireme::plan
