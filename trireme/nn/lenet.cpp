#include "trireme/nn/lenet.h"

#include <ATen/ATen.h>

namespace trireme::nn {
namespace {

at::Tensor pooled(const at::Tensor& x) {
  return at::max_pool2d(at::relu(x), {2, 2});
}

}  // namespace

LeNet::LeNet(const plan::VisionConfig& config) : VisionModel(config) {
  const auto [first, second] = plan::kLeNetChannels;
  const auto [wide, narrow] = plan::kLeNetFeatures;
  const auto conv = [](int64_t out, int64_t in, int64_t padding) {
    return std::make_shared<Conv2d>(
        Conv2d::Shape{.out = out, .in = in, .kernel = 5, .padding = padding, .with_bias = true});
  };
  conv1_ = register_module("conv1", conv(first, config.channels, 2));
  conv2_ = register_module("conv2", conv(second, first, 0));
  fc1_ = register_module("fc1", std::make_shared<Linear>(plan::lenet_flat_size(config), wide, true));
  fc2_ = register_module("fc2", std::make_shared<Linear>(wide, narrow, true));
  fc3_ = register_module("fc3", std::make_shared<Linear>(narrow, config.classes, true));
}

std::vector<Unit> LeNet::body() {
  return {{plan::kRootUnit,
           [this](const at::Tensor& images) {
             return pooled(conv1_->forward(as_input(images, conv1_->weight)));
           }},
          {"conv2", [this](const at::Tensor& x) { return pooled(conv2_->forward(x)); }},
          // Features in the order of (C, H, W), whatever the layout in memory.
          {"fc1", [this](const at::Tensor& x) { return at::relu(fc1_->forward(x.flatten(1))); }},
          {"fc2", [this](const at::Tensor& x) { return at::relu(fc2_->forward(x)); }}};
}

}  // namespace trireme::nn
