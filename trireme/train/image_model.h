#pragma once
// A model of images on a rank of a mesh.
#include <memory>

#include "trireme/comm/mesh.h"
#include "trireme/nn/vision_model.h"

namespace trireme::train {

/// The model that `config` describes, parameters uninitialised, on the CPU; buffers on the device of the
/// mesh. Norms over all ranks, where the config asks for them, are parallel::SyncBatchNorm over mesh.dp: then
/// forward and backward in training mode are collective. Throws ConfigError as plan::check().
std::shared_ptr<nn::VisionModel> make_image_model(const plan::VisionConfig& config, const comm::Mesh& mesh);

}  // namespace trireme::train
