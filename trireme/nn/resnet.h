#pragma once
// Residual networks (He et al. 2016) as torchvision has them: stride in the 3x3 convolution of a bottleneck,
// norms after convolutions, a 1x1 convolution in shortcuts that change shape.
#include <memory>
#include <vector>

#include "trireme/nn/layers.h"
#include "trireme/nn/vision_model.h"

namespace trireme::nn {

/// A convolution without bias and the norm behind it.
struct NormedConv {
  std::shared_ptr<Conv2d> conv;
  NormLayer norm;
  at::Tensor operator()(const at::Tensor& x, Statistics statistics, const After& after = {}) const {
    return norm.apply(conv->forward(x), statistics, after);
  }
};

/// Two 3x3 convolutions, or 1x1, 3x3 and 1x1, added to the input or its projection.
class ResidualBlock : public torch::nn::Module {
 public:
  ResidualBlock(const plan::ResNetShape::Block& block, bool bottleneck, const NormMaker& make_norm);
  at::Tensor forward(const at::Tensor& x, Statistics statistics);  // (B, in, H, W) -> (B, out, H', W')

 private:
  std::vector<NormedConv> layers_;
  NormedConv projection_;  ///< no conv: the input itself
};

class ResNet : public VisionModel {
 public:
  ResNet(const plan::VisionConfig& config, const NormMaker& make_norm);

 private:
  std::vector<Unit> body() override;
  at::Tensor head(const at::Tensor& x) override;
  at::Tensor stem(const at::Tensor& images);

  NormedConv stem_;
  std::vector<std::pair<std::string, std::shared_ptr<ResidualBlock>>> blocks_;
  std::shared_ptr<Linear> fc_;
};

}  // namespace trireme::nn
