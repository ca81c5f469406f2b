// Your own loop on 1 to N ranks; called again it goes on: trireme launch -n 2 ./your_module run/state 60
#include <torch/torch.h>

#include <filesystem>
#include <iostream>

#include "trireme/comm/mesh.h"
#include "trireme/parallel/wrap.h"
#include "trireme/state/state_file.h"

namespace nn = torch::nn;
namespace parallel = trireme::parallel;
namespace state = trireme::state;

struct Net : nn::Module {
  Net() {
    for (int i = 0; i < 4; ++i) blocks->push_back(nn::Sequential(nn::Linear(64, 64), nn::GELU()));
  }
  at::Tensor forward(const at::Tensor& image) {
    at::Tensor x = image.flatten(1);
    for (const auto& block : *blocks) x = x + block->as<nn::Sequential>()->forward(x);
    return head(x);
  }
  nn::ModuleList blocks{register_module("blocks", nn::ModuleList())};
  nn::Linear head{register_module("head", nn::Linear(64, 4))};
};

/// This rank's part of `rows` images: 8x8 noise with one bright quadrant, whose number is the label.
std::pair<at::Tensor, at::Tensor> images(uint64_t seed, int64_t rows, const trireme::comm::Mesh& mesh) {
  torch::manual_seed(seed);
  const at::Tensor labels = at::randint(4, {rows}, at::kLong);
  const at::Tensor bright = at::one_hot(labels, 4).view({rows, 2, 1, 2, 1}).expand({rows, 2, 4, 2, 4});
  const at::Tensor pixels = at::randn({rows, 8, 8}) + bright.reshape({rows, 8, 8});
  const auto part = [&](const at::Tensor& all) {
    return all.tensor_split(mesh.dp->size())[static_cast<size_t>(mesh.dp_rank)].to(mesh.world->device());
  };
  return {part(pixels), part(labels)};
}

double validate(Net& net, parallel::DataParallel& engine, const trireme::comm::Mesh& mesh) {
  double right = 0.0, rows = 0.0;
  auto evaluation = engine.evaluate();
  for (int batch = 0; evaluation.next(batch < 3); ++batch) {
    const auto [x, y] = images(1000 + batch, 50, mesh);
    right += (net.forward(x).argmax(1) == y).sum().item<double>();
    rows += static_cast<double>(y.numel());
  }
  return evaluation.mean(right, rows);
}

int main(int argc, char** argv) try {
  if (argc != 3) throw std::invalid_argument("usage: your_module STATE-FILE STEPS");
  const std::string path = argv[1];
  const auto world = trireme::comm::World::join_environment();
  const auto mesh = trireme::comm::make_mesh(world, trireme::plan::MeshShape::fit({}, world->size()));
  torch::manual_seed(1);
  Net net;
  const auto engine = parallel::fully_shard(net, mesh);
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), torch::optim::AdamWOptions(3e-3));
  int64_t step = 0;
  if (std::filesystem::exists(path)) step = std::stol(state::load_state(*engine, optimizer, path).at("step"));
  while (step < std::stol(argv[2])) {
    for (const bool last : {false, true}) {  // two micro-batches
      const auto [x, y] = images(2 * step + last, 48, mesh);
      const at::Tensor loss = nn::functional::cross_entropy(net.forward(x), y);
      last ? engine->backward(loss) : engine->accumulate(loss);
    }
    engine->clip_grad_norm(1.0);
    engine->step(optimizer);
    if (++step % 10 == 0) state::save_state(*engine, optimizer, path, {{"step", std::to_string(step)}});
  }
  const double accuracy = validate(net, *engine, mesh);
  const std::string digest = parallel::weights_digest(*engine);
  if (world->rank() == 0)
    std::cout << "step " << step << " accuracy " << accuracy << " weights " << digest << "\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
