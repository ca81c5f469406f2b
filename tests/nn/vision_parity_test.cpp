// Law 4 for models of images: logits, every gradient, 20 losses, the final weights and running statistics
// equal PyTorch's, from the files that tests/reference/make_vision_reference.py wrote. Goes through the
// data-parallel engine on one rank and our optimizer, whole and with blocks computed again in backward.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/support/relative_error.h"
#include "tests/support/spawn.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/train/connect.h"
#include "trireme/train/image_model.h"

namespace trireme {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

struct VisionCase {
  explicit VisionCase(const std::string& folder)
      : settings(nlohmann::json::parse(read_file(folder + "/case.json"))),
        tensors(folder + "/case.safetensors") {
    const nlohmann::json& keys = settings["model"];
    model.family = plan::parse<plan::ModelFamily>(keys["family"].get<std::string>()).value();
    model.depth = keys["depth"];
    model.width = keys["width"];
    model.stem = plan::parse<plan::ImageStem>(keys["stem"].get<std::string>()).value();
    model.norm = plan::parse<plan::ImageNorm>(keys["norm"].get<std::string>()).value();
    model.norm_groups = keys["norm_groups"];
    model.channels = keys["channels"];
    model.image_size = keys["image_size"];
    model.classes = keys["classes"];
    model.label_smoothing = keys["label_smoothing"];
  }

  nlohmann::json settings;
  checkpoint::SafetensorsReader tensors;
  plan::VisionConfig model;
};

/// What two right implementations in fp32 may differ by: as much as each differs from fp64.
double allowed(const VisionCase& reference) {
  return std::max(1e-5, 2.0 * reference.settings["noise"].get<double>());
}

void expect_equal(const VisionCase& reference, const std::string& kind, const Tensors& values) {
  for (const auto& [name, value] : values) {
    const std::string key = name.empty() ? kind : kind + "/" + name;
    EXPECT_LT(test::relative_error(value, reference.tensors.read(key)), allowed(reference)) << key;
  }
}

void expect_series(const VisionCase& reference, const std::string& name, const std::vector<double>& values) {
  const auto wanted = reference.settings[name].get<std::vector<double>>();
  EXPECT_LT(test::relative_error(at::tensor(values, at::kDouble), at::tensor(wanted, at::kDouble)),
            allowed(reference))
      << name;
}

/// The reference's model in the engine, on one rank.
class TrainedVision {
 public:
  TrainedVision(const VisionCase& reference, const comm::Mesh& mesh, const plan::MemoryConfig& memory)
      : settings_(reference.settings),
        units_(plan::describe(reference.model).units),
        model_(train::make_image_model(reference.model, mesh)),
        engine_(*model_, units_, mesh, {.policy = plan::find_policy(plan::PolicyName::kFsdp)},
                [&](const std::string& name, const plan::Region& region, at::Tensor& out) {
                  out.copy_(reference.tensors.read("weights/" + name, region));
                }),
        optimizer_(optim::build({.beta1 = settings_["beta1"],
                                 .beta2 = settings_["beta2"],
                                 .eps = settings_["eps"],
                                 .weight_decay = settings_["weight_decay"]},
                                engine_.optimizer_params())) {
    train::connect(*model_, engine_, memory);
  }
  TrainedVision(const TrainedVision&) = delete;
  TrainedVision& operator=(const TrainedVision&) = delete;

  /// Without effect on running statistics.
  at::Tensor logits(const at::Tensor& images) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> before;
    for (const at::Tensor& buffer : model_->buffers()) before.push_back(buffer.clone());
    at::Tensor logits = model_->forward(images);
    for (size_t i = 0; i < before.size(); ++i) model_->buffers()[i].copy_(before[i]);
    return logits;
  }
  at::Tensor evaluated(const at::Tensor& images) {
    const at::NoGradGuard no_grad;
    model_->eval();
    return model_->forward(images);
  }

  /// The loss, whose gradients are there afterwards.
  double differentiate(const at::Tensor& images, const at::Tensor& targets) {
    const at::Tensor loss = model_->loss(images, targets);
    engine_.backward(loss);
    return loss.item<double>();
  }

  /// Updates with those gradients; returns their norm before clipping.
  double step() {
    const double norm = std::sqrt(engine_.local_grad_squares());
    optimizer_->set_lr(settings_["lr"]);
    engine_.step_scaled(*optimizer_, optim::clip_factor(norm, settings_["grad_clip"]));
    return norm;
  }

  Tensors gradients() {
    Tensors grads;
    const std::vector<optim::FlatParam> params = engine_.optimizer_params();
    for (size_t i = 0; i < units_.size(); ++i) {
      const plan::FlatLayout layout(units_[i].params, 1);
      for (const plan::FlatEntry& entry : layout.entries())
        grads[entry.name] = params[i].grad.narrow(0, entry.offset, entry.numel).view(entry.shape);
    }
    return grads;
  }
  Tensors weights() {
    Tensors weights;
    engine_.visit_weights(
        [&](const std::string& name, const at::Tensor& weight) { weights[name] = weight.clone(); });
    return weights;
  }
  Tensors buffers() {
    Tensors buffers;
    for (const auto& entry : model_->named_buffers()) buffers[entry.key()] = entry.value();
    return buffers;
  }

 private:
  const nlohmann::json& settings_;
  std::vector<plan::UnitSpec> units_;
  std::shared_ptr<nn::VisionModel> model_;
  parallel::DataParallel engine_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

class VisionParity : public ::testing::TestWithParam<const char*> {
 protected:
  std::string folder() const { return std::string(REFERENCE_DIR) + "/vision/" + GetParam(); }
  void SetUp() override {
    if (!std::filesystem::exists(folder())) {
      GTEST_SKIP() << "no reference from PyTorch: configure with -DTRIREME_PYTHON=<python with torch 2.11>";
    }
  }
};

TEST_P(VisionParity, LogitsGradientsLossesWeightsAndStatisticsEqualPyTorch) {
  const VisionCase reference(folder());
  const at::Tensor images = reference.tensors.read("images"), targets = reference.tensors.read("targets");
  for (const plan::Recompute recompute : {plan::Recompute::kNone, plan::Recompute::kBlock}) {
    test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
      TrainedVision trained(reference, comm::make_mesh(world, plan::MeshShape::fit({}, 1)),
                            {.recompute = recompute});
      expect_equal(reference, "logits", {{"", trained.logits(images[0])}});
      std::vector<double> losses, norms;
      for (int64_t step = 0; step < images.size(0); ++step) {
        losses.push_back(trained.differentiate(images[step], targets[step]));
        if (step == 0) expect_equal(reference, "grads", trained.gradients());
        norms.push_back(trained.step());
      }
      expect_series(reference, "losses", losses);
      expect_series(reference, "grad_norms", norms);
      expect_equal(reference, "final", trained.weights());
      expect_equal(reference, "buffers", trained.buffers());
      expect_equal(reference, "evaluated", {{"", trained.evaluated(images[0])}});
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Models, VisionParity,
                         ::testing::Values("resnet8_batch", "resnet8_group_smoothed", "resnet18_imagenet",
                                           "resnet50_imagenet", "lenet"),
                         [](const auto& reference) { return std::string(reference.param); });

}  // namespace
}  // namespace trireme
