// Records of image models against what is published of them: parameters of torchvision's table and of He et
// al. (2016), and the products of a pass.
#include "trireme/plan/vision_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

VisionFacts facts_of(std::string_view preset) {
  return describe(find_vision_preset(preset).model);
}

std::map<std::string, ParamSpec> params_of(const VisionFacts& facts) {
  std::map<std::string, ParamSpec> params;
  for (const UnitSpec& unit : facts.units) {
    for (const ParamSpec& param : unit.params) {
      EXPECT_TRUE(params.emplace(param.name, param).second) << param.name << " is there twice";
    }
  }
  return params;
}

TEST(VisionModel, HasThePublishedNumberOfParameters) {
  const std::map<std::string, int64_t> published = {{"resnet18", 11'689'512},
                                                    {"resnet34", 21'797'672},
                                                    {"resnet50", 25'557'032},
                                                    {"resnet18-cifar", 11'173'962},
                                                    {"resnet50-cifar", 23'520'842},
                                                    {"small-resnet20", 272'474},
                                                    {"lenet", 61'706}};
  for (const VisionPreset& preset : vision_presets())
    EXPECT_EQ(facts_of(preset.name).params, published.at(std::string(preset.name))) << preset.name;
  for (const auto& [depth, params] : std::map<int64_t, int64_t>{{101, 44'549'160}, {152, 60'192'808}}) {
    VisionConfig model = find_vision_preset("resnet50").model;
    model.depth = depth;
    EXPECT_EQ(describe(model).params, params) << depth;
  }
}

/// torchvision's table gives products of a forward pass in billions with two digits.
TEST(VisionModel, MultipliesAsOftenAsPublished) {
  const std::map<std::string, double> published = {
      {"resnet18", 1.81}, {"resnet34", 3.66}, {"resnet50", 4.09}};
  for (const auto& [name, billions] : published)
    EXPECT_NEAR(facts_of(name).flops_per_image / 6.0 * 1e-9, billions, 0.005) << name;
  // 28^2 x 6 x 25, 10^2 x 16 x 150, 400 x 120, 120 x 84, 84 x 10
  EXPECT_EQ(facts_of("lenet").flops_per_image, 6.0 * (117'600 + 240'000 + 48'000 + 10'080 + 840));
}

TEST(VisionModel, NamesWhatTorchvisionNames) {
  const auto params = params_of(facts_of("resnet50"));
  const auto shape = [&](const std::string& name) { return params.at(name).shape; };
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(shape("conv1.weight"), (Shape{64, 3, 7, 7}));
  EXPECT_EQ(shape("bn1.bias"), (Shape{64}));
  EXPECT_EQ(shape("layer1.0.downsample.0.weight"), (Shape{256, 64, 1, 1}));
  EXPECT_EQ(shape("layer2.0.conv1.weight"), (Shape{128, 256, 1, 1}));
  EXPECT_EQ(shape("layer4.2.conv2.weight"), (Shape{512, 512, 3, 3}));
  EXPECT_EQ(shape("layer4.0.downsample.1.weight"), (Shape{2048}));
  EXPECT_EQ(shape("fc.weight"), (Shape{1000, 2048}));
  EXPECT_FALSE(params.contains("layer1.1.downsample.0.weight"));
  EXPECT_FALSE(params_of(facts_of("resnet18")).contains("layer1.0.downsample.0.weight"));
}

TEST(VisionModel, HasAUnitForTheStemEachBlockAndTheHead) {
  for (const auto& [name, blocks] : std::map<std::string, size_t>{
           {"resnet18", 8}, {"resnet34", 16}, {"resnet50", 16}, {"small-resnet20", 9}, {"lenet", 3}}) {
    const VisionFacts facts = facts_of(name);
    ASSERT_EQ(facts.units.size(), blocks + 2) << name;
    EXPECT_EQ(facts.units.front().name, kRootUnit);
    EXPECT_EQ(facts.units.back().name, kHeadUnit);
    for (size_t i = 1; i + 1 < facts.units.size(); ++i) {
      const std::string prefix = facts.units[i].name + ".";
      for (const ParamSpec& param : facts.units[i].params) EXPECT_EQ(param.name.rfind(prefix, 0), 0u);
    }
  }
}

/// Who deals in layers and widths alone takes it for a model whose head is its own and reads one row.
TEST(VisionModel, HasTheSizesOfAModelOfLayers) {
  for (const VisionPreset& preset : vision_presets()) {
    ModelConfig model;
    model.family = preset.model.family;
    model.vision = preset.model;
    const ModelConfig whole = complete_vision(model);
    const VisionFacts facts = describe(preset.model);
    EXPECT_EQ(whole.n_layers + 2, std::ssize(facts.units)) << preset.name;
    EXPECT_EQ(whole.vocab_size * (whole.d_model + 1), facts.units.back().numel()) << preset.name;
    EXPECT_FALSE(whole.tie_embeddings) << preset.name;
    EXPECT_EQ(whole.max_seq_len, 1) << preset.name;
    EXPECT_EQ(whole.n_heads, whole.n_kv_heads) << preset.name;
  }
}

TEST(VisionModel, DecaysNeitherNormsNorBiases) {
  for (const VisionPreset& preset : vision_presets()) {
    for (const auto& [name, param] : params_of(describe(preset.model)))
      EXPECT_EQ(param.decays, param.shape.size() >= 2) << name;
  }
}

TEST(VisionModel, StartsConvolutionsWithTheVarianceOfHe) {
  const auto params = params_of(facts_of("resnet18"));
  EXPECT_DOUBLE_EQ(params.at("layer2.0.conv1.weight").initial.deviation, std::sqrt(2.0 / (128 * 9)));
  EXPECT_EQ(params.at("layer2.0.bn1.weight").initial.mean, 1.0);
  EXPECT_EQ(params.at("layer2.0.bn1.bias").initial.mean, 0.0);
  EXPECT_DOUBLE_EQ(params.at("fc.weight").initial.deviation, std::sqrt(1.0 / (3 * 512)));
}

TEST(VisionModel, KeepsRunningStatisticsWithBatchNormOnly) {
  VisionConfig model = find_vision_preset("small-resnet20").model;
  const auto buffers_of = [](const VisionFacts& facts) {
    std::set<std::string> names;
    for (const BufferSpec& buffer : facts.buffers) names.insert(buffer.name);
    return names;
  };
  const std::set<std::string> buffers = buffers_of(describe(model));
  EXPECT_EQ(buffers.size(), 3u * 21) << "19 norms behind convolutions, 2 in shortcuts";
  EXPECT_TRUE(buffers.contains("layer2.0.downsample.1.running_var"));
  model.norm = ImageNorm::kSyncBatch;
  EXPECT_EQ(buffers_of(describe(model)), buffers);
  model.norm = ImageNorm::kGroup;
  EXPECT_TRUE(describe(model).buffers.empty());
}

TEST(VisionModel, KeepsLessWhereBlocksAreComputedAgain) {
  const VisionConfig model = find_vision_preset("resnet50").model;
  const auto kept = [&](const PrecisionConfig& precision, const MemoryConfig& memory) {
    return describe(model, precision, memory).saved_bytes_per_image;
  };
  const double all = kept({}, {});
  const double half_again = kept({}, {.recompute = Recompute::kBlock, .recompute_every = 2});
  const double again = kept({}, {.recompute = Recompute::kBlock});
  EXPECT_LT(again, 0.4 * all);
  EXPECT_LT(again, half_again);
  EXPECT_LT(half_again, all);
  EXPECT_LT(kept({.compute = Dtype::kBf16}, {}), 0.53 * all) << "places of maxima keep their size";
}

/// As nn/convolution.cpp and nn/max_pool.cpp keep it where images are channels-last.
TEST(VisionModel, KeepsTurnedWeightsAndNoInputOfAPoolOnAGpu) {
  VisionConfig model = find_vision_preset("resnet18").model;
  double turned = 0.0;
  for (const UnitSpec& unit : describe(model).units) {
    for (const ParamSpec& param : unit.params)
      if (param.shape.size() == 4 && param.shape[2] > 1) turned += static_cast<double>(param.numel());
  }
  constexpr double kRelu = 64.0 * 112 * 112, kPlaces = 64.0 * 56 * 56, kStem = 64.0 * 3 * 7 * 7;
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    const auto element = static_cast<double>(bytes_of(dtype));
    const auto difference = [&] {
      const VisionFacts facts = describe(model, {.compute = dtype});
      return facts.saved_on_gpu.of_image - facts.saved_bytes_per_image;
    };
    model.channels_last = true;
    model.norm = ImageNorm::kBatch;
    EXPECT_EQ(describe(model, {.compute = dtype}).saved_on_gpu.of_micro_batch, element * turned);
    EXPECT_EQ(difference(), -element * kRelu - 7.0 * kPlaces);
    model.norm = ImageNorm::kGroup;  // on a GPU ATen's, whose output is not channels-last
    EXPECT_EQ(describe(model, {.compute = dtype}).saved_on_gpu.of_micro_batch, element * kStem);
    EXPECT_EQ(difference(), 0.0);
    EXPECT_EQ(describe(model, {.compute = dtype}).units[1].image.saved_on_gpu.of_first_unit,
              element * 64 * 64 * 3 * 3);
    model.channels_last = false;
    for (const ImageNorm norm : {ImageNorm::kGroup, ImageNorm::kBatch}) {
      model.norm = norm;
      EXPECT_EQ(describe(model, {.compute = dtype}).saved_on_gpu.of_micro_batch, 0.0);
      EXPECT_EQ(difference(), 0.0);
    }
  }
}

std::string refusal_of(const VisionConfig& model) {
  try {
    check(model);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(VisionModel, RefusesWhatNoModelCanBe) {
  EXPECT_EQ(refusal_of({}), "");
  EXPECT_EQ(refusal_of({.depth = 56}), "");
  EXPECT_NE(refusal_of({.depth = 19}).find("depth=19"), std::string::npos);
  EXPECT_NE(refusal_of({.depth = 19}).find("such as 20"), std::string::npos);
  EXPECT_NE(refusal_of({.depth = -3}).find("such as 8"), std::string::npos);
  EXPECT_NE(refusal_of({.width = 0}).find("width=0"), std::string::npos);
  EXPECT_NE(refusal_of({.width = 12, .norm = ImageNorm::kGroup}).find("norm_groups=8"), std::string::npos);
  EXPECT_EQ(refusal_of({.width = 12, .norm = ImageNorm::kBatch}), "");
  EXPECT_NE(refusal_of({.norm = ImageNorm::kGroup, .norm_groups = 0}).find("norm_groups=0"),
            std::string::npos);
  EXPECT_NE(refusal_of({.family = ModelFamily::kLeNet, .image_size = 11}).find("at least 12"),
            std::string::npos);
  EXPECT_NE(refusal_of({.classes = 0}).find("classes=0"), std::string::npos);
  EXPECT_NE(refusal_of({.label_smoothing = 1.0}).find("label_smoothing=1"), std::string::npos);
  EXPECT_NE(refusal_of({.label_smoothing = std::nan("")}).find("label_smoothing"), std::string::npos);
}

TEST(VisionModel, NamesTheNearestPreset) {
  try {
    find_vision_preset("resnet51");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'resnet5"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace trireme::plan
