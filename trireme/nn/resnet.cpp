#include "trireme/nn/resnet.h"

#include <ATen/ATen.h>

#include "trireme/nn/max_pool.h"

namespace trireme::nn {
namespace {

NormedConv add_layer(torch::nn::Module& owner, const std::string& conv, const std::string& norm,
                     const Conv2d::Shape& shape, const NormMaker& make_norm) {
  NormedConv layer{owner.register_module(conv, std::make_shared<Conv2d>(shape)), make_norm(shape.out)};
  owner.register_module(norm, layer.norm.module);
  return layer;
}

}  // namespace

ResidualBlock::ResidualBlock(const plan::ResNetShape::Block& block, bool bottleneck,
                             const NormMaker& make_norm) {
  const auto add = [&](const Conv2d::Shape& shape) {
    const std::string number = std::to_string(layers_.size() + 1);
    layers_.push_back(add_layer(*this, "conv" + number, "bn" + number, shape, make_norm));
  };
  const int64_t middle = block.middle;
  if (bottleneck) {
    add({.out = middle, .in = block.in, .kernel = 1});
    add({.out = middle, .in = middle, .kernel = 3, .stride = block.stride, .padding = 1});
    add({.out = block.out, .in = middle, .kernel = 1});
  } else {
    add({.out = middle, .in = block.in, .kernel = 3, .stride = block.stride, .padding = 1});
    add({.out = block.out, .in = middle, .kernel = 3, .padding = 1});
  }
  if (!block.projects) return;
  const auto shortcut = register_module("downsample", std::make_shared<Namespace>());
  projection_ = add_layer(*shortcut, "0", "1",
                          {.out = block.out, .in = block.in, .kernel = 1, .stride = block.stride}, make_norm);
}

at::Tensor ResidualBlock::forward(const at::Tensor& x, Statistics statistics) {
  at::Tensor y = x;
  for (size_t i = 0; i + 1 < layers_.size(); ++i) y = layers_[i](y, statistics, {.relu = true});
  const at::Tensor residual = projection_.conv ? projection_(x, statistics) : x;
  return layers_.back()(y, statistics, {.residual = residual, .relu = true});
}

ResNet::ResNet(const plan::VisionConfig& config, const NormMaker& make_norm) : VisionModel(config) {
  const bool small = config.stem == plan::ImageStem::kCifar;
  const Conv2d::Shape stem =
      small
          ? Conv2d::Shape{.out = config.width, .in = config.channels, .kernel = 3, .padding = 1}
          : Conv2d::Shape{.out = config.width, .in = config.channels, .kernel = 7, .stride = 2, .padding = 3};
  stem_ = add_layer(*this, "conv1", "bn1", stem, make_norm);
  const plan::ResNetShape shape = plan::resnet_shape(config);
  for (const plan::ResNetShape::Block& block : shape.blocks) {
    const size_t dot = block.name.find('.');
    const std::string stage = block.name.substr(0, dot);
    if (!named_children().contains(stage)) register_module(stage, std::make_shared<Namespace>());
    blocks_.emplace_back(
        block.name,
        named_children()[stage]->register_module(
            block.name.substr(dot + 1), std::make_shared<ResidualBlock>(block, shape.bottleneck, make_norm)));
  }
  fc_ = register_module("fc", std::make_shared<Linear>(shape.features, config.classes, true));
}

at::Tensor ResNet::stem(const at::Tensor& images) {
  const at::Tensor x = stem_(as_input(images, stem_.conv->weight), Statistics::kUpdate, {.relu = true});
  if (config().stem == plan::ImageStem::kCifar) return x;
  return max_pool(x, /*kernel=*/3, /*stride=*/2, /*padding=*/1);
}

std::vector<Unit> ResNet::body() {
  std::vector<Unit> units{{plan::kRootUnit, [this](const at::Tensor& images) { return stem(images); }}};
  for (const auto& [name, block] : blocks_) {
    const auto run = [block = block.get()](Statistics statistics) {
      return [block, statistics](const at::Tensor& x) { return block->forward(x, statistics); };
    };
    units.push_back({.name = name, .forward = run(Statistics::kUpdate), .again = run(Statistics::kLeave)});
  }
  return units;
}

at::Tensor ResNet::head(const at::Tensor& x) {
  return fc_->forward(at::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
}

}  // namespace trireme::nn
