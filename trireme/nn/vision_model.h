#pragma once
// Models of images: images to logits or the loss, with parameters, buffers and units as plan/vision_model.h
// has them.
#include <memory>
#include <vector>

#include "trireme/nn/image_layers.h"
#include "trireme/nn/model.h"
#include "trireme/plan/vision_model.h"

namespace trireme::nn {

class VisionModel : public Model {
 public:
  explicit VisionModel(const plan::VisionConfig& config) : config_(config) {}

  /// In forward order: the stem, images (B, channels, H, W) of any floating dtype -> (B, C, H', W'); the
  /// blocks; the head, -> logits (B, classes), all in the dtype of the parameters.
  std::vector<Unit> units_in(const Documents& documents) override;
  /// As units(), with the head as the loss: mean cross-entropy in nats, scalar fp32. targets: (B) int64
  /// classes, or (B, classes) probabilities in a floating dtype. In training mode the loss has the config's
  /// label smoothing.
  std::vector<Unit> units(const LossTarget& target) override;
  using Model::units;

 protected:
  /// The stem and the blocks.
  virtual std::vector<Unit> body() = 0;
  /// The last block's output -> logits (B, classes)
  virtual at::Tensor head(const at::Tensor& x) = 0;
  /// Images in the dtype of `weight` and in the layout that the config asks for.
  at::Tensor as_input(const at::Tensor& images, const at::Tensor& weight) const;
  const plan::VisionConfig& config() const { return config_; }

 private:
  plan::VisionConfig config_;
};

/// The model that `config` describes, parameters uninitialised, fp32, on the CPU. `sync_batch` makes the
/// norms when the config asks for batch norms over all ranks, of which this room knows nothing. Throws
/// ConfigError as plan::check().
std::shared_ptr<VisionModel> build(const plan::VisionConfig& config, const NormMaker& sync_batch = {});

}  // namespace trireme::nn
