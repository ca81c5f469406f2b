#include "trireme/nn/vision_model.h"

#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/nn/lenet.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/resnet.h"

namespace trireme::nn {
namespace {

NormMaker norms_of(const plan::VisionConfig& config, const NormMaker& sync_batch) {
  switch (config.norm) {
    case plan::ImageNorm::kBatch:
      return batch_norms();
    case plan::ImageNorm::kGroup:
      return group_norms(config.norm_groups);
    case plan::ImageNorm::kSyncBatch:
      break;
  }
  TRIREME_CHECK(sync_batch, "[nn.build] norm={} needs a factory for such norms, but none was passed",
                config.norm);
  return sync_batch;
}

}  // namespace

std::vector<Unit> VisionModel::units_in(const Documents&) {
  std::vector<Unit> units = body();
  units.push_back({.name = plan::kHeadUnit, .forward = [this](const at::Tensor& x) { return head(x); }});
  return units;
}

std::vector<Unit> VisionModel::units(const LossTarget& target) {
  std::vector<Unit> units = body();
  units.push_back({.name = plan::kHeadUnit, .forward = [this, target](const at::Tensor& x) {
                     // A mean over no rows would be NaN.
                     if (x.size(0) == 0) return head(x).sum(at::kFloat);
                     const double smoothing = is_training() ? config_.label_smoothing : 0.0;
                     const bool hard = smoothing == 0.0 && !target.targets.is_floating_point();
                     if (hard) return cross_entropy(head(x), target.targets);
                     return at::cross_entropy_loss(head(x).to(at::kFloat), target.targets, /*weight=*/{},
                                                   at::Reduction::Mean, /*ignore_index=*/-100, smoothing);
                   }});
  return units;
}

at::Tensor VisionModel::as_input(const at::Tensor& images, const at::Tensor& weight) const {
  if (images.dim() != 4 || images.size(1) != config_.channels || images.size(2) != config_.image_size ||
      images.size(3) != config_.image_size) {
    throw ConfigError(
        "[nn.vision_model] images have shape ({}), but the model takes (B, {}, {}, {}); change the data, or "
        "the model's channels and image_size",
        fmt::join(images.sizes(), ", "), config_.channels, config_.image_size, config_.image_size);
  }
  const auto layout = config_.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  const at::Tensor x = images.to(weight.scalar_type()).contiguous(layout);
  if (!config_.channels_last || config_.channels > 1) return x;
  // With one channel both layouts are the same bytes, and layers take theirs from the strides.
  const int64_t size = config_.image_size;
  return x.as_strided(x.sizes(), {size * size, 1, size, 1});
}

std::shared_ptr<VisionModel> build(const plan::VisionConfig& config, const NormMaker& sync_batch) {
  plan::check(config);
  if (config.family == plan::ModelFamily::kLeNet) return std::make_shared<LeNet>(config);
  return std::make_shared<ResNet>(config, norms_of(config, sync_batch));
}

}  // namespace trireme::nn
