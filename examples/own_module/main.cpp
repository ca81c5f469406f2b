// A CNN with DDP and a residual MLP with FSDP, both your own: trireme launch -n 2 ./own_module
#include <torch/torch.h>

#include <iostream>

#include "trireme/comm/mesh.h"
#include "trireme/parallel/wrap.h"

namespace nn = torch::nn;

struct Cnn : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return head(at::max_pool2d(at::relu(norm(body(x))), 4).flatten(1));
  }
  nn::Conv2d body{register_module("body", nn::Conv2d(nn::Conv2dOptions(1, 8, 3).padding(1)))};
  nn::BatchNorm2d norm{register_module("norm", nn::BatchNorm2d(8))};
  nn::Linear head{register_module("head", nn::Linear(8 * 2 * 2, 4))};
};

struct ResidualMlp : nn::Module {
  ResidualMlp() {
    for (int i = 0; i < 6; ++i)
      blocks->push_back(nn::Sequential(nn::Linear(64, 128), nn::GELU(), nn::Linear(128, 64)));
  }
  at::Tensor forward(const at::Tensor& image) {
    at::Tensor x = image.flatten(1);
    for (const auto& block : *blocks) x = x + block->as<nn::Sequential>()->forward(x);
    return head(x);
  }
  nn::ModuleList blocks{register_module("blocks", nn::ModuleList())};
  nn::Linear head{register_module("head", nn::Linear(64, 4))};
};

/// 8x8 noise with one bright quadrant: its number is the label.
std::pair<at::Tensor, at::Tensor> images(int64_t count, at::Device device) {
  at::Tensor pixels = at::randn({count, 1, 8, 8}), labels = at::randint(4, {count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t label = labels[i].item<int64_t>();
    pixels[i][0].narrow(0, label / 2 * 4, 4).narrow(1, label % 2 * 4, 4) += 1.0;
  }
  return {pixels.to(device), labels.to(device)};
}

template <typename Model>
double train(Model& model, trireme::parallel::DataParallel& engine, const trireme::comm::Mesh& mesh) {
  auto optimizer = trireme::optim::adamw(engine.optimizer_params(), {.lr = 3e-3});
  torch::manual_seed(100 + mesh.dp_rank);  // every rank draws images of its own
  double accuracy = 0.25;
  for (int step = 0; step < 60; ++step) {
    const auto [x, y] = images(32, mesh.world->device());
    const at::Tensor logits = model.forward(x);
    engine.backward(nn::functional::cross_entropy(logits, y));
    engine.clip_grad_norm(1.0);
    engine.step(*optimizer);
    accuracy = 0.9 * accuracy + 0.1 * (logits.argmax(1) == y).to(at::kDouble).mean().item<double>();
  }
  trireme::parallel::sync_buffers(model, mesh);  // BatchNorm's running statistics
  return accuracy;
}

int main() try {
  const auto world = trireme::comm::World::join_environment();
  const auto mesh = trireme::comm::make_mesh(world, trireme::plan::MeshShape::fit({}, world->size()));
  torch::manual_seed(1);  // torch's own seed differs from run to run
  Cnn cnn;
  ResidualMlp mlp;
  const double with_ddp = train(cnn, *trireme::parallel::data_parallel(cnn, mesh), mesh);
  const double with_fsdp = train(mlp, *trireme::parallel::fully_shard(mlp, mesh), mesh);
  if (world->rank() == 0) std::cout << "CNN, DDP: " << with_ddp << "; MLP, FSDP: " << with_fsdp << "\n";
  return with_ddp > 0.7 && with_fsdp > 0.7 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
