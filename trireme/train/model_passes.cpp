#include "trireme/train/model_passes.h"

#include <ATen/ATen.h>

#include "trireme/nn/language_model.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/top_k.h"
#include "trireme/parallel/tensor_joint.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/train/image_model.h"

namespace trireme::train {

Scores score_images(const at::Tensor& logits, const at::Tensor& targets) {
  const auto number = [](const at::Tensor& scalar) { return scalar.to(at::kDouble).item<double>(); };
  const auto rows = static_cast<double>(logits.size(0));
  return {.rows = rows,
          .loss = rows * number(nn::cross_entropy(logits.to(at::kFloat), targets)),
          .top1 = number(nn::top_k_hits(logits, targets, 1)),
          .top5 = number(nn::top_k_hits(logits, targets, 5))};
}

std::shared_ptr<nn::Model> make_model(const ModelSetup& setup, const comm::Mesh& mesh) {
  const plan::Config& config = setup.config;
  if (plan::reads_images(config.model.family)) return make_image_model(config.model.vision, mesh);
  const std::shared_ptr<nn::Model> text = nn::build(plan::split_model(config.model, setup.held.split));
  const comm::Mesh& ranks = setup.mesh;
  if (const int64_t tp = ranks.tp->size(); tp > 1)
    text->set_joint(
        parallel::make_joint(ranks, plan::split_vocabulary(config.model, tp), config.parallel.async_tp));
  text->set_context(
      parallel::make_context(ranks, plan::token_split(config, ranks.cp_rank), config.parallel.overlap));
  return text;
}

plan::StepProgram given_program(const ModelSetup& setup) {
  const plan::Device device = setup.mesh.world->device().is_cpu() ? plan::Device::kCpu : plan::Device::kCuda;
  const plan::EngineSetting setting =
      plan::engine_setting(setup.config, setup.mesh.shape, setup.batch.accumulation, device);
  return plan::config_program(setup.config, setup.held, setup.batch, setting, setup.mesh.pp_rank);
}

}  // namespace trireme::train
