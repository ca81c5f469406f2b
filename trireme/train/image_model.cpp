#include "trireme/train/image_model.h"

#include "trireme/parallel/sync_batch_norm.h"

namespace trireme::train {

std::shared_ptr<nn::VisionModel> make_image_model(const plan::VisionConfig& config, const comm::Mesh& mesh) {
  const auto sync_batch = [group = mesh.dp](int64_t channels) -> nn::NormLayer {
    const auto norm = std::make_shared<parallel::SyncBatchNorm>(channels, group);
    return {norm, [norm](const at::Tensor& x, nn::Statistics statistics, const nn::After& after) {
              const bool updates = statistics == nn::Statistics::kUpdate;
              return nn::apply_after(norm->forward(x, updates), after);
            }};
  };
  const std::shared_ptr<nn::VisionModel> model = nn::build(config, sync_batch);
  for (const auto& entry : model->named_buffers()) {
    at::Tensor buffer = entry.value();
    buffer.set_data(buffer.to(mesh.world->device()));
  }
  return model;
}

}  // namespace trireme::train
