#pragma once
// Models of images, and what can be known of them before any device exists: residual networks (He et al.
// 2016) by the names and shapes of torchvision's checkpoints, and LeNet-5 (LeCun et al. 1998). The built
// modules (nn/vision_model.h) must agree with it, which is a test.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/choices.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {

struct VisionPreset {
  std::string_view name;
  std::string_view summary;  ///< one line
  VisionConfig model;
};
std::span<const VisionPreset> vision_presets();
/// Throws ConfigError with the nearest name when there is none of that name.
const VisionPreset& find_vision_preset(std::string_view name);

struct VisionFacts {
  /// In forward order: the root (stem), the blocks, the head.
  std::vector<UnitSpec> units;
  std::vector<BufferSpec> buffers;
  int64_t params = 0;
  /// Forward and backward: 6 for each product of a weight with a value, of convolutions and linear layers.
  double flops_per_image = 0.0;
  double saved_bytes_per_image = 0.0;  ///< activations kept for backward on a CPU, at the compute dtype
  SavedOnGpu saved_on_gpu = {};
};

/// Throws ConfigError as check().
VisionFacts describe(const VisionConfig& model, const PrecisionConfig& precision = {},
                     const MemoryConfig& memory = {});

/// The buffers of the layers that have parameters in `units`.
std::vector<BufferSpec> buffers_of(const VisionConfig& model, std::span<const UnitSpec> units);

/// Throws ConfigError that names the key, its value and what would do: a depth that no network has, sizes
/// below 1, images too small for the model, groups that do not divide the channels.
void check(const VisionConfig& model);

/// `model`, whose family reads images, with the fields of a text model filled in: its blocks between stem and
/// head as layers, the head's features as width, classes as vocabulary, sequences of one. Throws ConfigError
/// as check().
ModelConfig complete_vision(ModelConfig model);

/// The channels and strides of a residual network, from which the record and the module are made.
struct ResNetShape {
  struct Block {
    std::string name;  ///< "layer1.0"
    int64_t in, out;   ///< channels
    int64_t middle;    ///< channels of the convolutions inside
    int64_t stride;    ///< of one 3x3 convolution, and of the shortcut
    bool projects;     ///< the shortcut has a 1x1 convolution, "downsample"
  };
  bool bottleneck;  ///< 1x1, 3x3, 1x1 instead of 3x3, 3x3
  std::vector<Block> blocks;
  int64_t features;  ///< channels that the head sees
};
/// `model` is one that check() accepts, of family resnet.
ResNetShape resnet_shape(const VisionConfig& model);

/// Channels and height after the convolutions of LeNet-5, for the first of its linear layers.
inline constexpr int64_t kLeNetChannels[] = {6, 16};
inline constexpr int64_t kLeNetFeatures[] = {120, 84};
int64_t lenet_flat_size(const VisionConfig& model);

}  // namespace trireme::plan
