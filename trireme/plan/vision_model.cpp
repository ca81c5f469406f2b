#include "trireme/plan/vision_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

/// The blocks of each stage.
struct Depth {
  bool bottleneck;
  std::vector<int64_t> blocks;
};

std::optional<Depth> depth_of(int64_t layers) {
  switch (layers) {
    case 18:
      return Depth{false, {2, 2, 2, 2}};
    case 34:
      return Depth{false, {3, 4, 6, 3}};
    case 50:
      return Depth{true, {3, 4, 6, 3}};
    case 101:
      return Depth{true, {3, 4, 23, 3}};
    case 152:
      return Depth{true, {3, 8, 36, 3}};
    default:
      break;
  }
  if (layers < 8 || layers % 6 != 2) return std::nullopt;
  const int64_t blocks = (layers - 2) / 6;
  return Depth{false, {blocks, blocks, blocks}};
}

constexpr int64_t kExpansion = 4;  // of a bottleneck: channels at its end by channels inside

/// Normal with the deviation sqrt(2 / fan_out), for layers in front of a ReLU (He et al. 2015).
ParamSpec convolution(const std::string& module, int64_t out, int64_t in, int64_t kernel) {
  const double deviation = std::sqrt(2.0 / static_cast<double>(out * kernel * kernel));
  return {module + ".weight", {out, in, kernel, kernel}, {.deviation = deviation}};
}

/// A layer of weight and bias that starts with the variance that torch's Linear and Conv2d start with, 1 / (3
/// fan_in), but a bias of zeros.
void add_layer(std::vector<ParamSpec>& params, const std::string& module, std::vector<int64_t> shape) {
  int64_t fan_in = 1;
  for (size_t dim = 1; dim < shape.size(); ++dim) fan_in *= shape[dim];
  const int64_t out = shape.front();
  const double deviation = 1.0 / std::sqrt(3.0 * static_cast<double>(fan_in));
  params.push_back({module + ".weight", std::move(shape), {.deviation = deviation}});
  params.push_back({module + ".bias", {out}});
}

int64_t halved(int64_t size) {
  return (size + 1) / 2;
}

/// Writes down units in forward order, with what a pass multiplies and keeps for one image.
class Recorder {
 public:
  Recorder(const VisionConfig& model, const PrecisionConfig& precision, const MemoryConfig& memory)
      : model_(model), element_bytes_(bytes_of(precision.compute)), memory_(memory) {}

  VisionFacts resnet() {
    const ResNetShape shape = resnet_shape(model_);
    begin(kRootUnit);
    const bool small = model_.stem == ImageStem::kCifar;
    keep_image();
    if (!small) size_ = halved(size_);
    conv("conv1", model_.width, model_.channels, small ? 3 : 7);
    norm("bn1", model_.width);
    if (small) {
      keep(model_.width);  // the ReLU's output
    } else {
      pooled_relu();
    }
    give(model_.width * size_ * size_);
    for (size_t i = 0; i < shape.blocks.size(); ++i) block(shape, i);
    begin(kHeadUnit);
    keep_bytes(element_bytes_ * shape.features);
    linear("fc", model_.classes, shape.features);
    give(model_.classes);
    return finish();
  }

  VisionFacts lenet() {
    begin(kRootUnit);
    keep_image();
    pooled_conv("conv1", kLeNetChannels[0], model_.channels);
    begin("conv2");
    size_ -= 4;  // no padding
    pooled_conv("conv2", kLeNetChannels[1], kLeNetChannels[0]);
    int64_t in = lenet_flat_size(model_);
    for (int layer = 0; layer < 2; ++layer) {
      const std::string name = fmt::format("fc{}", layer + 1);
      begin(name);
      linear(name, kLeNetFeatures[layer], in);
      in = kLeNetFeatures[layer];
      keep_bytes(element_bytes_ * in);
      give(in);
    }
    begin(kHeadUnit);
    linear("fc3", model_.classes, in);
    give(model_.classes);
    return finish();
  }

 private:
  void begin(const std::string& unit) {
    facts_.units.push_back({unit, {}});
    keeps_ = at_input_ = true;
  }
  /// The unit's output.
  void give(int64_t elements) { costs().output_bytes = static_cast<double>(element_bytes_ * elements); }
  ImageCosts& costs() { return facts_.units.back().image; }
  std::vector<ParamSpec>& params() { return facts_.units.back().params; }

  void keep_bytes(int64_t bytes) { keep_bytes(bytes, bytes); }
  void keep_bytes(int64_t on_cpu, int64_t on_gpu) {
    if (!keeps_) return;
    costs().saved_bytes += static_cast<double>(on_cpu);
    costs().saved_on_gpu.of_image += static_cast<double>(on_gpu);
  }
  /// Bytes of an activation with so many channels at the present size.
  int64_t activation(int64_t channels) const { return element_bytes_ * channels * size_ * size_; }
  void keep(int64_t channels) { keep_bytes(activation(channels)); }

  /// Whether activations behind the first norm are channels-last on a GPU, where ATen's group norm gives
  /// others.
  bool stays_channels_last() const { return model_.channels_last && model_.norm != ImageNorm::kGroup; }

  /// Whether our own kernels run on a GPU: rows of channels that they load 16 bytes at a time.
  bool has_kernels(int64_t channels) const {
    return stays_channels_last() && channels * element_bytes_ % 16 == 0;
  }

  /// Behind the stem's norm, a ReLU and a maximum over 3x3, with the place of each maximum. Our kernel keeps
  /// a byte for each place and not its input, and our batch norm sees from its own input where ReLU let
  /// values pass.
  void pooled_relu() {
    const int64_t width = model_.width, relu = activation(width);
    const bool kernels = has_kernels(width), batch_norm = model_.norm == ImageNorm::kBatch;
    keep_bytes(relu, kernels && batch_norm ? 0 : relu);
    size_ = halved(size_);
    const int64_t places = width * size_ * size_;
    keep(width);
    keep_bytes(8 * places, kernels ? places : 8 * places);
  }

  /// An image comes as fp32 in the layout of the model; in another dtype it is the model's own.
  void keep_image() {
    if (element_bytes_ != bytes_of(Dtype::kFp32)) keep(model_.channels);
  }

  void multiply(int64_t weights, int64_t positions) {
    costs().flops += 2.0 * static_cast<double>(weights) * static_cast<double>(positions);
  }

  /// size_ is that of its output. On a GPU each micro-batch keeps the weight as the layout of the input wants
  /// it, which for 1x1 is the weight itself.
  void conv(const std::string& name, int64_t out, int64_t in, int64_t kernel) {
    params().push_back(convolution(name, out, in, kernel));
    const int64_t weights = params().back().numel();
    multiply(weights, size_ * size_);
    const bool is_first = std::exchange(at_input_, false);  // of its unit
    if (!keeps_ || !model_.channels_last || kernel == 1) return;
    const auto turned = static_cast<double>(element_bytes_ * weights);
    const bool is_stem = facts_.units.size() == 1;
    if (is_stem || stays_channels_last()) {
      costs().saved_on_gpu.of_micro_batch += turned;
    } else if (is_first) {
      costs().saved_on_gpu.of_first_unit = turned;  // between stages activations travel channels-last
    }
  }

  /// A norm of what a convolution gave, which it keeps.
  void norm(const std::string& name, int64_t channels) {
    params().push_back({name + ".weight", {channels}, {.mean = 1.0}});
    params().push_back({name + ".bias", {channels}});
    keep(channels);
    if (model_.norm == ImageNorm::kSyncBatch) costs().synced_channels.push_back(channels);
    if (model_.norm == ImageNorm::kGroup) return;
    facts_.buffers.push_back({name + ".running_mean", {channels}});
    facts_.buffers.push_back({name + ".running_var", {channels}});
    facts_.buffers.push_back({name + ".num_batches_tracked", {}});
  }

  void linear(const std::string& name, int64_t out, int64_t in) {
    add_layer(params(), name, {out, in});
    multiply(out * in, 1);
  }

  /// 5x5, ReLU and a maximum over 2x2.
  void pooled_conv(const std::string& name, int64_t out, int64_t in) {
    add_layer(params(), name, {out, in, 5, 5});
    multiply(out * in * 25, size_ * size_);
    keep(out);
    size_ /= 2;
    keep(out);
    keep_bytes(8 * out * size_ * size_);
    give(out * size_ * size_);
  }

  void block(const ResNetShape& shape, size_t index) {
    const ResNetShape::Block& block = shape.blocks[index];
    begin(block.name);
    const auto every = static_cast<size_t>(memory_.recompute_every);
    // A block that is computed again keeps its input, the output of the one before, and nothing else.
    const bool keeps_inside = memory_.recompute != Recompute::kBlock || index % every != 0;
    keeps_ = keeps_inside;
    costs().computed_again = !keeps_inside;
    int64_t in = block.in;
    const auto layer = [&](int number, int64_t out, int64_t kernel, bool activated) {
      conv(fmt::format("{}.conv{}", block.name, number), out, in, kernel);
      norm(fmt::format("{}.bn{}", block.name, number), out);
      if (activated) keep(out);
      in = out;
    };
    if (shape.bottleneck) {
      layer(1, block.middle, 1, true);
      if (block.stride == 2) size_ = halved(size_);
      layer(2, block.middle, 3, true);
      layer(3, block.out, 1, false);
    } else {
      if (block.stride == 2) size_ = halved(size_);
      layer(1, block.middle, 3, true);
      layer(2, block.out, 3, false);
    }
    if (block.projects) {
      conv(block.name + ".downsample.0", block.out, block.in, 1);
      norm(block.name + ".downsample.1", block.out);
    }
    // The head needs only the mean of the last block's output.
    keeps_ = keeps_inside || index + 1 < shape.blocks.size();
    keep(block.out);
    give(block.out * size_ * size_);
  }

  VisionFacts finish() {
    for (const UnitSpec& unit : facts_.units) {
      facts_.params += unit.numel();
      facts_.flops_per_image += 3.0 * unit.image.flops;
      facts_.saved_bytes_per_image += unit.image.saved_bytes;
      facts_.saved_on_gpu.of_image += unit.image.saved_on_gpu.of_image;
      facts_.saved_on_gpu.of_micro_batch += unit.image.saved_on_gpu.of_micro_batch;
    }
    return std::move(facts_);
  }

  const VisionConfig& model_;
  int64_t element_bytes_;
  const MemoryConfig& memory_;
  VisionFacts facts_;
  int64_t size_ = model_.image_size;
  bool keeps_ = true;
  bool at_input_ = true;  ///< no convolution of the unit has come yet
};

void check_positive(std::string_view key, int64_t value) {
  if (value >= 1) return;
  throw ConfigError("[plan.vision] model.{}={} is below 1; raise it", key, value);
}

/// The smallest image that leaves every layer a pixel.
int64_t least_image_size(const VisionConfig& model) {
  return model.family == ModelFamily::kLeNet ? 12 : 1;
}

void check_resnet(const VisionConfig& model) {
  check_positive("width", model.width);
  const std::optional<Depth> depth = depth_of(model.depth);
  if (!depth) {
    const int64_t nearest = std::max<int64_t>(8, (model.depth + 1) / 6 * 6 + 2);
    throw ConfigError(
        "[plan.vision] model.depth={} is not a ResNet depth; use 18, 34, 50, 101, 152 or 6 n + 2, such as {}",
        model.depth, nearest);
  }
  if (model.norm != ImageNorm::kGroup) return;
  check_positive("norm_groups", model.norm_groups);
  if (model.width % model.norm_groups == 0) return;
  throw ConfigError("[plan.vision] model.norm_groups={} does not divide model.width={}; change one of them",
                    model.norm_groups, model.width);
}

VisionConfig resnet(int64_t depth, int64_t width, ImageStem stem) {
  const bool large = stem == ImageStem::kImageNet;
  return {.depth = depth,
          .width = width,
          .stem = stem,
          .image_size = large ? 224 : 32,
          .classes = large ? 1000 : 10};
}

}  // namespace

std::span<const VisionPreset> vision_presets() {
  static const std::array<VisionPreset, 7> table = {
      {{"small-resnet20", "20 layers for CIFAR-10 (He et al. 2016), 272,474 parameters",
        resnet(20, 16, ImageStem::kCifar)},
       {"resnet18-cifar", "ResNet-18 with a 3x3 stem, 11,173,962 parameters",
        resnet(18, 64, ImageStem::kCifar)},
       {"resnet50-cifar", "ResNet-50 with a 3x3 stem, 23,520,842 parameters",
        resnet(50, 64, ImageStem::kCifar)},
       {"resnet18", "ResNet-18 as in torchvision, 11,689,512 parameters",
        resnet(18, 64, ImageStem::kImageNet)},
       {"resnet34", "ResNet-34 as in torchvision, 21,797,672 parameters",
        resnet(34, 64, ImageStem::kImageNet)},
       {"resnet50", "ResNet-50 as in torchvision (v1.5), 25,557,032 parameters",
        resnet(50, 64, ImageStem::kImageNet)},
       {"lenet",
        "LeNet-5 with ReLU and max pooling for MNIST, 61,706 parameters",
        {.family = ModelFamily::kLeNet, .channels = 1, .image_size = 28}}}};
  return table;
}

const VisionPreset& find_vision_preset(std::string_view name) {
  std::vector<std::string> names;
  for (const VisionPreset& preset : vision_presets()) {
    if (preset.name == name) return preset;
    names.emplace_back(preset.name);
  }
  const std::string near = nearest_name(name, names);
  throw ConfigError("[plan.vision] there is no model '{}'{}; choose one of {}", name,
                    near.empty() ? "" : fmt::format(", did you mean '{}'?", near), join(names, ", "));
}

ModelConfig complete_vision(ModelConfig model) {
  model.vision.family = model.family;
  const VisionFacts facts = describe(model.vision);
  model.n_layers = std::ssize(facts.units) - 2;
  model.d_model = facts.units.back().params.front().shape[1];
  model.n_heads = model.n_kv_heads = 1;
  model.d_ff = model.d_model;
  model.vocab_size = model.vision.classes;
  model.max_seq_len = 1;
  model.tie_embeddings = false;
  return model;
}

VisionFacts describe(const VisionConfig& model, const PrecisionConfig& precision,
                     const MemoryConfig& memory) {
  check(model);
  Recorder recorder(model, precision, memory);
  return model.family == ModelFamily::kLeNet ? recorder.lenet() : recorder.resnet();
}

std::vector<BufferSpec> buffers_of(const VisionConfig& model, std::span<const UnitSpec> units) {
  const auto layer_of = [](const std::string& name) { return name.substr(0, name.rfind('.')); };
  std::set<std::string> layers;
  for (const UnitSpec& unit : units)
    for (const ParamSpec& param : unit.params) layers.insert(layer_of(param.name));
  std::vector<BufferSpec> buffers = describe(model).buffers;
  std::erase_if(buffers, [&](const BufferSpec& buffer) { return !layers.contains(layer_of(buffer.name)); });
  return buffers;
}

void check(const VisionConfig& model) {
  check_positive("channels", model.channels);
  check_positive("image_size", model.image_size);
  check_positive("classes", model.classes);
  if (!(model.label_smoothing >= 0.0 && model.label_smoothing < 1.0)) {
    throw ConfigError("[plan.vision] model.label_smoothing={} must be at least 0 and below 1",
                      model.label_smoothing);
  }
  if (const int64_t least = least_image_size(model); model.image_size < least) {
    throw ConfigError("[plan.vision] model.image_size={} is too small for the layers of {}; use at least {}",
                      model.image_size, model.family, least);
  }
  if (model.family == ModelFamily::kResNet) check_resnet(model);
}

ResNetShape resnet_shape(const VisionConfig& model) {
  const std::optional<Depth> depth = depth_of(model.depth);
  TRIREME_CHECK(depth, "[plan.vision] no ResNet has {} layers", model.depth);
  ResNetShape shape{.bottleneck = depth->bottleneck, .blocks = {}, .features = model.width};
  int64_t middle = model.width;
  for (size_t stage = 0; stage < depth->blocks.size(); ++stage) {
    const int64_t out = middle * (depth->bottleneck ? kExpansion : 1);
    for (int64_t i = 0; i < depth->blocks[stage]; ++i) {
      const int64_t stride = stage > 0 && i == 0 ? 2 : 1;
      const int64_t in = shape.features;
      shape.blocks.push_back({.name = fmt::format("layer{}.{}", stage + 1, i),
                              .in = in,
                              .out = out,
                              .middle = middle,
                              .stride = stride,
                              .projects = stride > 1 || in != out});
      shape.features = out;
    }
    middle *= 2;
  }
  return shape;
}

int64_t lenet_flat_size(const VisionConfig& model) {
  const int64_t side = (model.image_size / 2 - 4) / 2;
  return kLeNetChannels[1] * side * side;
}

}  // namespace trireme::plan
