#pragma once
// LeNet-5 (LeCun et al. 1998) with ReLU and maxima in place of sigmoids and means, as it is taught today.
#include <memory>
#include <vector>

#include "trireme/nn/layers.h"
#include "trireme/nn/vision_model.h"

namespace trireme::nn {

class LeNet : public VisionModel {
 public:
  explicit LeNet(const plan::VisionConfig& config);

 private:
  std::vector<Unit> body() override;
  at::Tensor head(const at::Tensor& x) override { return fc3_->forward(x); }

  std::shared_ptr<Conv2d> conv1_, conv2_;
  std::shared_ptr<Linear> fc1_, fc2_, fc3_;
};

}  // namespace trireme::nn
