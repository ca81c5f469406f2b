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

/// Which record of plan/vision_model.cpp describes the model.
enum class VisionFamily { kResNet, kLeNet };
template <>
inline constexpr auto kNames<VisionFamily> = std::to_array<std::string_view>({"resnet", "lenet"});

/// What a residual network does before its first block.
enum class ImageStem {
  kCifar,    ///< 3x3, for images of some 32 pixels
  kImageNet  ///< 7x7 and a maximum over 3x3, each with stride 2
};
template <>
inline constexpr auto kNames<ImageStem> = std::to_array<std::string_view>({"cifar", "imagenet"});

/// What follows each convolution of a residual network.
enum class ImageNorm {
  kBatch,      ///< over the samples of a rank's micro-batch
  kSyncBatch,  ///< over those of all data-parallel ranks
  kGroup       ///< over groups of channels of one sample (Wu and He 2018)
};
template <>
inline constexpr auto kNames<ImageNorm> = std::to_array<std::string_view>({"batch", "sync_batch", "group"});

struct VisionConfig {
  VisionFamily family = VisionFamily::kResNet;
  /// resnet: layers with weights. 18, 34, 50, 101 and 152 have the four stages of torchvision's; 8, 14, 20
  /// and other 6 n + 2 the three of the networks for CIFAR-10.
  int64_t depth = 20;
  int64_t width = 16;                  ///< resnet: channels of the first stage, doubled by each later one
  ImageStem stem = ImageStem::kCifar;  ///< resnet
  ImageNorm norm = ImageNorm::kBatch;  ///< resnet
  int64_t norm_groups = 8;             ///< resnet with group norm: groups of channels
  int64_t channels = 3;                ///< of an image
  int64_t image_size = 32;             ///< height and width of an image
  int64_t classes = 10;
  double label_smoothing = 0.0;  ///< share of a target that is spread over all classes in training
  bool channels_last = true;     ///< activations as (B, H, W, C) in memory
};

struct VisionPreset {
  std::string_view name;
  std::string_view summary;  ///< one line
  VisionConfig model;
};
std::span<const VisionPreset> vision_presets();
/// Throws ConfigError with the nearest name when there is none of that name.
const VisionPreset& find_vision_preset(std::string_view name);

/// What a module keeps beside its parameters: running statistics of batch norm.
struct BufferSpec {
  std::string name;            ///< "layer1.0.bn1.running_mean"
  std::vector<int64_t> shape;  ///< empty: a count, int64; else fp32
};

struct VisionFacts {
  /// In forward order: the root (stem), the blocks, the head.
  std::vector<UnitSpec> units;
  std::vector<BufferSpec> buffers;
  int64_t params = 0;
  /// Forward and backward: 6 for each product of a weight with a value, of convolutions and linear layers.
  double flops_per_image = 0.0;
  double saved_bytes_per_image = 0.0;  ///< activations kept for backward, at the compute dtype
};

/// Throws ConfigError as check().
VisionFacts describe(const VisionConfig& model, const PrecisionConfig& precision = {},
                     const MemoryConfig& memory = {});

/// Throws ConfigError that names the key, its value and what would do: a depth that no network has, sizes
/// below 1, images too small for the model, groups that do not divide the channels.
void check(const VisionConfig& model);

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
