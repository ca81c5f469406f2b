// Models of images under every policy: the same bits, norms over ranks equal to those of one process, running
// statistics that take in each batch once.
#include "trireme/train/image_model.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "tests/support/spawn.h"
#include "trireme/base/hash.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/comm/mesh.h"
#include "trireme/nn/init.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/state/state_file.h"
#include "trireme/train/connect.h"

namespace trireme::train {
namespace {

using plan::ImageNorm;
using Tensors = std::map<std::string, at::Tensor>;

struct ImageRun {
  std::string policy = "ddp";
  ImageNorm norm = ImageNorm::kGroup;
  int64_t ranks = 1;
  int64_t replicas = 1;
  int64_t accumulation = 1;
  plan::Recompute recompute = plan::Recompute::kNone;
  at::ScalarType compute = at::kFloat;
  std::string weights_path = {};
};

struct Outcome {
  std::string digest;
  Tensors weights, buffers;  ///< of rank 0
  std::vector<double> losses;
  at::Tensor evaluated;  ///< logits of batch 0 in evaluation mode, with rank 0's statistics
};

plan::VisionConfig model_of(const ImageRun& run) {
  return {.depth = 8, .width = 8, .norm = run.norm, .norm_groups = 2, .image_size = 8, .classes = 5};
}

constexpr int64_t kSteps = 4, kBatch = 12;

/// Images of a step: noise on a brightness that is the class.
std::pair<at::Tensor, at::Tensor> batch_of(int64_t step) {
  at::Tensor images = at::empty({kBatch, 3, 8, 8});
  auto* const out = images.mutable_data_ptr<float>();
  for (int64_t i = 0; i < images.numel(); ++i)
    out[i] = static_cast<float>(
        static_cast<double>(mix64(static_cast<uint64_t>(step), static_cast<uint64_t>(i)) >> 11) * 0x1p-52 -
        1.0);
  const at::Tensor targets = at::arange(kBatch).remainder(5);
  images += targets.view({-1, 1, 1, 1}) * 0.5;
  return {images, targets};
}

Outcome train_on_images(const ImageRun& run) {
  at::set_num_threads(1);
  Outcome outcome;
  test::run_ranks(run.ranks, [&](std::shared_ptr<comm::World> world) {
    plan::ParallelConfig axes;
    axes.dp_replicate = run.replicas;
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
    const plan::VisionConfig config = model_of(run);
    const auto model = make_image_model(config, mesh);
    const std::vector<plan::UnitSpec> units = plan::describe(config).units;
    parallel::DataParallel engine(*model, units, mesh,
                                  {.policy = plan::find_policy(run.policy),
                                   .compute = run.compute,
                                   .reduce = run.compute,
                                   .average = parallel::Average::kSum},
                                  nn::InitialWeights(units, 5));
    connect(*model, engine, {.recompute = run.recompute});
    const auto optimizer = optim::build({.name = plan::OptimizerName::kSgd, .lr = 0.05, .weight_decay = 1e-3},
                                        engine.optimizer_params());
    const int64_t micro = kBatch / run.ranks / run.accumulation;
    const double scale = 1.0 / static_cast<double>(run.accumulation * run.ranks);
    for (int64_t step = 0; step < kSteps; ++step) {
      const auto [images, targets] = batch_of(step);
      double loss_sum = 0.0;
      for (int64_t pass = 0; pass < run.accumulation; ++pass) {
        const int64_t first = (mesh.dp_rank * run.accumulation + pass) * micro;
        const at::Tensor loss = model->loss(images.narrow(0, first, micro), targets.narrow(0, first, micro));
        pass + 1 == run.accumulation ? engine.backward(loss, scale) : engine.accumulate(loss, scale);
        loss_sum += scale * loss.item<double>();
      }
      engine.step(*optimizer);
      if (world->rank() == 0) outcome.losses.push_back(loss_sum);
    }
    if (!run.weights_path.empty()) state::save_weights(engine, run.weights_path);
    model->eval();
    const at::Tensor evaluated = [&] {
      const at::NoGradGuard no_grad;
      return model->forward(batch_of(0).first);
    }();
    const std::string digest = parallel::weights_digest(engine);
    Tensors weights;
    engine.visit_weights(
        [&](const std::string& name, const at::Tensor& weight) { weights[name] = weight.clone(); });
    if (world->rank() != 0) return;
    outcome.digest = digest;
    outcome.weights = weights;
    outcome.evaluated = evaluated;
    for (const auto& entry : model->named_buffers()) outcome.buffers[entry.key()] = entry.value().clone();
  });
  return outcome;
}

/// Relative, over all tensors.
double distance(const Tensors& got, const Tensors& wanted) {
  double difference = 0.0, size = 0.0;
  for (const auto& [name, tensor] : wanted) {
    const at::Tensor exact = tensor.to(at::kDouble);
    difference += (got.at(name).to(at::kDouble) - exact).square().sum().item<double>();
    size += exact.square().sum().item<double>();
  }
  return std::sqrt(difference / size);
}

void expect_same(const Outcome& got, const Outcome& wanted, const std::string& what) {
  EXPECT_EQ(got.digest, wanted.digest) << what;
  for (const auto& [name, buffer] : wanted.buffers)
    EXPECT_TRUE(at::equal(got.buffers.at(name), buffer)) << name << ", " << what;
}

TEST(ImageModels, EveryPolicyGivesTheSameBits) {
  for (const ImageNorm norm : plan::all_values<ImageNorm>()) {
    for (const int64_t ranks : {1, 2, 3, 4}) {
      const Outcome reference = train_on_images({.norm = norm, .ranks = ranks});
      for (const plan::Policy& policy : plan::policies()) {
        if (policy.hybrid && ranks % 2 != 0) continue;
        const ImageRun run{
            .policy = policy.label(), .norm = norm, .ranks = ranks, .replicas = policy.hybrid ? 2 : 1};
        const std::string what =
            policy.label() + " on " + std::to_string(ranks) + ", " + std::string(plan::name(norm));
        expect_same(train_on_images(run), reference, what);
      }
    }
  }
}

TEST(ImageModels, ManyRanksEqualOneWhereNormsDoNotDependOnTheBatchOfARank) {
  const Outcome whole = train_on_images({.norm = ImageNorm::kBatch});
  const Outcome group = train_on_images({.norm = ImageNorm::kGroup});
  for (const int64_t ranks : {2, 3, 4}) {
    EXPECT_LT(distance(train_on_images({.norm = ImageNorm::kGroup, .ranks = ranks}).weights, group.weights),
              1e-5);
    const Outcome sync = train_on_images({.norm = ImageNorm::kSyncBatch, .ranks = ranks});
    EXPECT_LT(distance(sync.weights, whole.weights), 1e-5) << ranks;
    EXPECT_LT(distance(sync.buffers, whole.buffers), 1e-5) << ranks;
    const Outcome apart = train_on_images({.norm = ImageNorm::kBatch, .ranks = ranks});
    EXPECT_GT(distance(apart.weights, whole.weights), 1e-3) << "else this proves nothing";
  }
}

TEST(ImageModels, BlocksThatAreComputedAgainChangeNoBitAndNoStatistics) {
  for (const ImageNorm norm : plan::all_values<ImageNorm>()) {
    for (const int64_t accumulation : {1, 2}) {
      ImageRun run{.policy = "fsdp", .norm = norm, .ranks = 2, .accumulation = accumulation};
      const Outcome kept = train_on_images(run);
      run.recompute = plan::Recompute::kBlock;
      const Outcome again = train_on_images(run);
      expect_same(again, kept, std::string(plan::name(norm)));
      if (norm == ImageNorm::kGroup) continue;
      EXPECT_EQ(again.buffers.at("layer1.0.bn1.num_batches_tracked").item<int64_t>(), kSteps * accumulation);
    }
  }
}

TEST(ImageModels, LearnInNarrowTypes) {
  const Outcome narrow =
      train_on_images({.policy = "fsdp", .norm = ImageNorm::kBatch, .ranks = 2, .compute = at::kBFloat16});
  const Outcome wide = train_on_images({.policy = "fsdp", .norm = ImageNorm::kBatch, .ranks = 2});
  EXPECT_LT(narrow.losses.back(), narrow.losses.front());
  EXPECT_NEAR(narrow.losses.back(), wide.losses.back(), 0.1 * wide.losses.back());
  EXPECT_EQ(narrow.buffers.at("bn1.running_var").scalar_type(), at::kFloat);
}

TEST(ImageModels, WeightsInFilesHaveTorchvisionsNamesAndTheStatistics) {
  const std::string path = ::testing::TempDir() + "trireme-image-model.safetensors";
  const Outcome trained =
      train_on_images({.policy = "fsdp", .norm = ImageNorm::kSyncBatch, .ranks = 2, .weights_path = path});
  const checkpoint::SafetensorsReader file(path);
  EXPECT_EQ(file.tensors().size(), trained.weights.size() + trained.buffers.size());
  for (const Tensors* tensors : {&trained.weights, &trained.buffers}) {
    for (const auto& [name, tensor] : *tensors) EXPECT_TRUE(at::equal(file.read(name), tensor)) << name;
  }
  EXPECT_EQ(file.tensors().at("layer2.0.downsample.1.running_var").shape, std::vector<int64_t>{16});
  // A program of its own, without an engine, reads them and evaluates as the trained model does.
  const auto model = nn::build(model_of({.norm = ImageNorm::kBatch}));
  const at::NoGradGuard no_grad;
  for (const auto& entry : model->named_parameters()) entry.value().copy_(file.read(entry.key()));
  for (const auto& entry : model->named_buffers()) entry.value().copy_(file.read(entry.key()));
  model->eval();
  EXPECT_LT(distance({{"", model->forward(batch_of(0).first)}}, {{"", trained.evaluated}}), 1e-6);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace trireme::train
