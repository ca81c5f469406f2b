// Models of images agree with their records in every name, shape and byte; layers against torch's own.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/normalization.h>

#include <map>

#include "tests/support/refusal.h"
#include "trireme/base/error.h"
#include "trireme/kernels/allocation_watch.h"
#include "trireme/nn/init.h"
#include "trireme/nn/top_k.h"
#include "trireme/nn/vision_model.h"

namespace trireme::nn {
namespace {

using plan::ImageNorm;
using plan::ModelFamily;
using plan::VisionConfig;

std::shared_ptr<VisionModel> make(const VisionConfig& config) {
  const auto model = build(config);
  InitialWeights(plan::describe(config).units, 3).fill(*model);
  return model;
}

VisionConfig small_resnet() {
  return {.depth = 8, .width = 8, .norm_groups = 4, .image_size = 16};
}

VisionConfig small_lenet() {
  return {.family = ModelFamily::kLeNet, .channels = 1, .image_size = 28};
}

/// Every family, stem, kind of block and norm.
std::vector<VisionConfig> small_models() {
  std::vector<VisionConfig> models = {small_resnet(), small_resnet(), small_lenet()};
  models[1].norm = ImageNorm::kGroup;
  for (const int64_t depth : {18, 50}) {
    VisionConfig model = small_resnet();
    model.depth = depth;
    model.stem = plan::ImageStem::kImageNet;
    model.image_size = 64;
    models.push_back(model);
  }
  return models;
}

at::Tensor images_for(const VisionConfig& config, int64_t batch) {
  return at::randn({batch, config.channels, config.image_size, config.image_size});
}

TEST(VisionModels, HaveTheParametersAndBuffersThatThePlanDescribes) {
  using Shapes = std::map<std::string, std::vector<int64_t>>;
  const auto expect_described = [](const VisionConfig& config, const std::string& name) {
    const plan::VisionFacts facts = plan::describe(config);
    Shapes described, built, described_buffers, built_buffers;
    for (const plan::UnitSpec& unit : facts.units) {
      for (const plan::ParamSpec& param : unit.params) described.emplace(param.name, param.shape);
    }
    for (const plan::BufferSpec& buffer : facts.buffers) described_buffers.emplace(buffer.name, buffer.shape);
    const auto model = build(config);
    for (const auto& entry : model->named_parameters())
      built.emplace(entry.key(), entry.value().sizes().vec());
    for (const auto& entry : model->named_buffers())
      built_buffers.emplace(entry.key(), entry.value().sizes().vec());
    EXPECT_EQ(built, described) << name;
    EXPECT_EQ(built_buffers, described_buffers) << name;
  };
  for (const plan::VisionPreset& preset : plan::vision_presets())
    expect_described(preset.model, std::string(preset.name));
  for (const VisionConfig& config : small_models()) expect_described(config, std::to_string(config.depth));
}

TEST(VisionModels, RunTheUnitsOfThePlanInItsOrder) {
  for (const VisionConfig& config : small_models()) {
    const auto model = make(config);
    std::vector<std::string> ran, planned;
    model->set_unit_runner([&](const Unit& unit, const at::Tensor& x, bool) {
      ran.push_back(unit.name);
      return unit.forward(x);
    });
    EXPECT_EQ(model->forward(images_for(config, 3)).sizes(), (at::IntArrayRef{3, config.classes}));
    for (const plan::UnitSpec& unit : plan::describe(config).units) planned.push_back(unit.name);
    EXPECT_EQ(ran, planned);
  }
}

TEST(VisionModels, GiveTheSameLogitsInBothLayouts) {
  for (VisionConfig config : small_models()) {
    config.channels_last = true;
    const auto last = make(config);
    config.channels_last = false;
    const auto first = make(config);
    const at::Tensor images = images_for(config, 4);
    const at::Tensor a = last->forward(images), b = first->forward(images);
    // Deep norms over few values amplify rounding; another order of elements would be wrong altogether.
    EXPECT_LT((a - b).norm().item<double>(), 1e-3 * b.norm().item<double>());
    if (config.family == ModelFamily::kLeNet) continue;
    const std::vector<Unit> units = last->units();
    const at::Tensor inside = last->run(std::span(units).first(2), images);
    EXPECT_TRUE(inside.is_contiguous(at::MemoryFormat::ChannelsLast));
  }
}

/// Memory of one channel is of both layouts, and only strides tell which is meant.
TEST(VisionModels, RunImagesOfOneChannelInTheLayoutOfTheConfig) {
  constexpr auto kLast = at::MemoryFormat::ChannelsLast;
  VisionConfig config = small_resnet();
  config.channels = 1;
  config.channels_last = true;
  const auto model = make(config);
  const at::Tensor images = images_for(config, 4);
  const int64_t size = config.image_size;
  const at::Tensor strided = images.as_strided(images.sizes(), {size * size, 1, size, 1});
  ASSERT_EQ(images.suggest_memory_format(), at::MemoryFormat::Contiguous);
  ASSERT_EQ(strided.suggest_memory_format(), kLast);
  model->set_unit_runner([&](const Unit& unit, const at::Tensor& x, bool) {
    const at::Tensor y = unit.forward(x);
    if (y.dim() == 4) {
      EXPECT_EQ(y.suggest_memory_format(), kLast) << unit.name;
    }
    return y;
  });
  EXPECT_TRUE(at::equal(model->forward(images), model->forward(strided)));
}

TEST(VisionModels, KeepTheBytesThatThePlanPredicts) {
  constexpr int64_t kBatch = 8;
  for (VisionConfig config : small_models()) {
    if (config.family == ModelFamily::kResNet) config.width = 16;
    const auto model = make(config);
    const at::Tensor images = images_for(config, kBatch).contiguous(at::MemoryFormat::ChannelsLast);
    const at::Tensor targets = at::zeros({kBatch}, at::kLong);
    model->loss(images, targets).backward();
    const auto predicted = plan::describe(config).saved_bytes_per_image * kBatch;
    const kernels::AllocationWatch watch;
    const at::Tensor loss = model->loss(images, targets);
    EXPECT_NEAR(static_cast<double>(watch.held()), predicted, 0.03 * predicted)
        << plan::name(config.family) << " of " << config.depth;
  }
}

TEST(VisionModels, SmoothLabelsInTrainingOnly) {
  VisionConfig config = small_resnet();
  config.norm = ImageNorm::kGroup;
  config.label_smoothing = 0.2;
  const auto model = make(config);
  const at::Tensor images = images_for(config, 5), targets = at::tensor({0, 3, 9, 3, 1}, at::kLong);
  const at::Tensor log_p = model->forward(images).to(at::kDouble).log_softmax(1);
  const double hard = -log_p.gather(1, targets.unsqueeze(1)).mean().item<double>();
  const double even = -log_p.mean().item<double>();
  EXPECT_NEAR(model->loss(images, targets).item<double>(), 0.8 * hard + 0.2 * even, 1e-5);
  model->eval();
  EXPECT_NEAR(model->loss(images, targets).item<double>(), hard, 1e-5);
}

TEST(VisionModels, TakeProbabilitiesAsTargets) {
  VisionConfig config = small_resnet();
  config.norm = ImageNorm::kGroup;
  const auto model = make(config);
  const at::Tensor images = images_for(config, 2);
  const at::Tensor one = at::tensor({2, 5}, at::kLong), other = at::tensor({7, 5}, at::kLong);
  const at::Tensor mixed = 0.3 * at::one_hot(one, 10).to(at::kFloat) + 0.7 * at::one_hot(other, 10);
  const auto loss = [&](const at::Tensor& targets) { return model->loss(images, targets).item<double>(); };
  EXPECT_NEAR(loss(mixed), 0.3 * loss(one) + 0.7 * loss(other), 1e-5);
}

TEST(VisionModels, RefuseOtherImagesAndClasses) {
  const auto model = make(small_resnet());
  const auto of = [&](at::IntArrayRef shape) {
    return test::failure_of([&] { model->forward(at::zeros(shape)); });
  };
  EXPECT_EQ(of({2, 3, 16, 16}), "");
  EXPECT_NE(of({2, 1, 16, 16}).find("(2, 1, 16, 16)"), std::string::npos);
  EXPECT_NE(of({2, 3, 16, 15}).find("(B, 3, 16, 16)"), std::string::npos);
  EXPECT_NE(of({3, 16, 16}).find("(3, 16, 16)"), std::string::npos);
  EXPECT_THROW(model->loss(at::zeros({1, 3, 16, 16}), at::full({1}, 10, at::kLong)), DataError);
}

// Layers.

TEST(VisionModels, OfNoImagesHaveNoLossGradientsOfZeroAndTheStatisticsThatTheyHad) {
  for (const VisionConfig& config : small_models()) {
    for (const bool soft : {false, true}) {
      SCOPED_TRACE(fmt::format("depth {}, norm {}, soft {}", config.depth, config.norm, soft));
      const auto model = make(config);
      const auto targets = soft ? at::zeros({0, config.classes}) : at::zeros({0}, at::kLong);
      const at::Tensor loss =
          model->loss(at::zeros({0, config.channels, config.image_size, config.image_size}), targets);
      EXPECT_EQ(loss.item<double>(), 0.0);
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
      loss.backward();
      for (const auto& entry : model->named_parameters()) {
        ASSERT_TRUE(entry.value().grad().defined()) << entry.key();
        EXPECT_EQ(entry.value().grad().abs().max().item<double>(), 0.0) << entry.key();
      }
      for (const auto& entry : model->named_buffers()) {
        const double wanted = entry.key().ends_with("running_var") ? 1.0 : 0.0;
        EXPECT_TRUE(entry.value().eq(wanted).all().item<bool>()) << entry.key();
      }
    }
  }
}

/// A 1x1 convolution with a stride, forward and backward, against torch's in fp64.
void check_strided_point(int64_t in, int64_t out, int64_t batch, int64_t side) {
  Conv2d conv({.out = out, .in = in, .kernel = 1, .stride = 2});
  {
    const at::NoGradGuard no_grad;
    conv.weight.normal_();
  }
  const at::Tensor x =
      at::randn({batch, in, side, side}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  const at::Tensor wide_x = x.detach().to(at::kDouble).requires_grad_(),
                   wide_weight = conv.weight.detach().to(at::kDouble).requires_grad_();
  const at::Tensor y = conv.forward(x), wanted = at::conv2d(wide_x, wide_weight, {}, {2, 2});
  const at::Tensor dy = at::randn_like(y);
  y.backward(dy);
  wanted.backward(dy.to(at::kDouble));
  const auto is_close = [](const at::Tensor& got, const at::Tensor& wide) {
    return at::allclose(got.to(at::kDouble), wide, 1e-4, 1e-4);
  };
  EXPECT_TRUE(is_close(y, wanted));
  EXPECT_TRUE(is_close(x.grad(), wide_x.grad()));
  EXPECT_TRUE(is_close(conv.weight.grad(), wide_weight.grad()));
}

// What writes beyond its memory ends this program, at once or where the memory is freed.
TEST(ConvLayer, WithAStrideIsTorchsInAnyWidthOnAnyNumberOfThreads) {
  struct Widths {
    int64_t in, out;
  };
  std::vector<Widths> all = {{8, 8}, {8, 9}, {16, 24}, {24, 32}, {16, 32}};
  for (const int64_t in : {1, 3, 4, 6, 8, 9, 10, 12, 14, 15, 18, 20}) all.push_back({in, 2 * in});
  const int threads_before = at::get_num_threads();
  for (const int threads : {1, 2, 3, 4}) {
    at::set_num_threads(threads);
    for (const Widths widths : all) {
      for (const int64_t batch : {1, 7}) {
        for (const int64_t side : {7, 16}) {
          SCOPED_TRACE(fmt::format("{} to {} channels, {} images of side {}, {} threads", widths.in,
                                   widths.out, batch, side, threads));
          check_strided_point(widths.in, widths.out, batch, side);
        }
      }
    }
  }
  at::set_num_threads(threads_before);
}

TEST(BatchNormLayer, EqualsTorchsInTrainingAndEvaluation) {
  BatchNorm ours(6);
  torch::nn::BatchNorm2d theirs(6);
  {
    const at::NoGradGuard no_grad;
    theirs->weight.uniform_(0.5, 1.5);
    theirs->bias.uniform_(-1, 1);
    ours.weight.copy_(theirs->weight);
    ours.bias.copy_(theirs->bias);
  }
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = at::randn({4, 6, 5, 5});
    EXPECT_TRUE(at::equal(ours.forward(x), theirs->forward(x)));
  }
  EXPECT_TRUE(at::equal(ours.running_mean, theirs->running_mean));
  EXPECT_TRUE(at::equal(ours.running_var, theirs->running_var));
  EXPECT_TRUE(at::equal(ours.num_batches_tracked, theirs->num_batches_tracked));
  ours.eval();
  theirs->eval();
  const at::Tensor x = at::randn({1, 6, 1, 1});
  EXPECT_TRUE(at::equal(ours.forward(x), theirs->forward(x)));
}

TEST(BatchNormLayer, LeavesStatisticsWhenTold) {
  BatchNorm norm(3);
  const at::NoGradGuard no_grad;
  norm.weight.fill_(1);
  norm.bias.fill_(0);
  const at::Tensor x = at::randn({2, 3, 4, 4});
  const at::Tensor first = norm.forward(x, Statistics::kLeave);
  EXPECT_TRUE(at::equal(norm.running_mean, at::zeros({3})));
  EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), 0);
  EXPECT_TRUE(at::equal(norm.forward(x), first));
  EXPECT_FALSE(at::equal(norm.running_mean, at::zeros({3})));
}

TEST(BatchNormLayer, KeepsWideStatisticsOfNarrowValues) {
  BatchNorm norm(3);
  const at::NoGradGuard no_grad;
  norm.weight.set_data(at::ones({3}, at::kBFloat16));
  norm.bias.set_data(at::zeros({3}, at::kBFloat16));
  const at::Tensor x = at::randn({4, 3, 8, 8}).to(at::kBFloat16);
  EXPECT_EQ(norm.forward(x).scalar_type(), at::kBFloat16);
  EXPECT_EQ(norm.running_mean.scalar_type(), at::kFloat);
  const at::Tensor mean = x.to(at::kDouble).mean({0, 2, 3});
  EXPECT_LT((norm.running_mean.to(at::kDouble) - 0.1 * mean).abs().max().item<double>(), 1e-6);
}

TEST(BatchNormLayer, RefusesOneValuePerChannelInTraining) {
  BatchNorm norm(3);
  EXPECT_NE(test::failure_of([&] {
              norm.forward(at::zeros({1, 3, 1, 1}));
            }).find("(1, 3, 1, 1)"),
            std::string::npos);
  norm.eval();
  EXPECT_EQ(test::failure_of([&] { norm.forward(at::zeros({1, 3, 1, 1})); }), "");
}

TEST(GroupNormLayer, EqualsTorchs) {
  GroupNorm ours(3, 6);
  torch::nn::GroupNorm theirs(3, 6);
  const at::NoGradGuard no_grad;
  theirs->weight.uniform_(0.5, 1.5);
  theirs->bias.uniform_(-1, 1);
  ours.weight.copy_(theirs->weight);
  ours.bias.copy_(theirs->bias);
  const at::Tensor x = at::randn({4, 6, 5, 5});
  EXPECT_TRUE(at::equal(ours.forward(x), theirs->forward(x)));
}

/// Torch's own layer crashes on a CPU where a channels-last input needs no gradient.
TEST(GroupNormLayer, TrainsAPartOfItselfBehindWhatIsFrozen) {
  const at::Tensor x = at::randn({2, 6, 5, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  for (const bool bias : {true, false}) {
    GroupNorm norm(3, 6);
    norm.weight.detach().fill_(0.5);
    norm.bias.detach().zero_();
    (bias ? norm.weight : norm.bias).set_requires_grad(false);
    const at::Tensor trained = bias ? norm.bias : norm.weight;
    const at::Tensor y = norm.forward(x);
    y.square().sum().backward();
    const at::Tensor normed = y.detach() * 2;
    const at::Tensor wanted = ((bias ? at::ones_like(normed) : normed) * 2 * y.detach()).sum({0, 2, 3});
    EXPECT_TRUE(at::allclose(trained.grad(), wanted, 1e-4, 1e-4)) << (bias ? "bias" : "weight");
  }
}

TEST(TopK, CountsRowsWhoseTargetIsAmongTheLargest) {
  const at::Tensor logits = at::tensor({3.0, 1.0, 2.0, 0.0,  //
                                        0.0, 0.0, 0.0, 0.0,  //
                                        5.0, 4.0, 3.0, 9.0})
                                .view({3, 4});
  const auto hits = [&](const at::Tensor& targets, int64_t k) {
    return top_k_hits(logits, targets, k).item<int64_t>();
  };
  const at::Tensor targets = at::tensor({2, 1, 3}, at::kLong);
  EXPECT_EQ(hits(targets, 1), 1) << "of equal logits the lower class comes first";
  EXPECT_EQ(hits(targets, 2), 3);
  EXPECT_EQ(hits(at::tensor({3, 3, 2}, at::kLong), 3), 0);
  EXPECT_EQ(hits(at::tensor({3, 3, 2}, at::kLong), 4), 3);
}

TEST(TopK, AgreesWithSortingRandomLogits) {
  const at::Tensor logits = at::randn({50, 20}), targets = at::randint(20, {50}, at::kLong);
  for (const int64_t k : {1, 5, 20}) {
    const at::Tensor best = std::get<1>(logits.topk(k, 1));
    const int64_t expected = (best == targets.unsqueeze(1)).any(1).sum().item<int64_t>();
    EXPECT_EQ(top_k_hits(logits, targets, k).item<int64_t>(), expected);
  }
}

TEST(TopK, IsNeverRightAboutNaN) {
  const at::Tensor logits = at::full({2, 8}, std::nan("")), targets = at::tensor({0, 7}, at::kLong);
  EXPECT_EQ(top_k_hits(logits, targets, 5).item<int64_t>(), 0);
}

}  // namespace
}  // namespace trireme::nn
