// A residual MLP of your own torch::nn modules as a pipeline over all ranks: trireme launch -n 2 ./pipeline
// With a schedule's name and the number of stages a rank: trireme launch -n 2 ./pipeline interleaved_1f1b 2
#include <torch/torch.h>
#include <iostream>

#include "trireme/comm/mesh.h"
#include "trireme/parallel/pipeline.h"

namespace nn = torch::nn;
namespace plan = trireme::plan;
namespace parallel = trireme::parallel;

constexpr int64_t kInput = 16, kWidth = 64, kClasses = 4, kBlocks = 8, kMicroBatches = 8;

/// A share of the blocks, if only none; the first stage reads the input, the last one has the head.
struct Part : nn::Module {
  Part(int64_t stage, int64_t stages) {
    if (stage == 0) input = register_module("input", nn::Linear(kInput, kWidth));
    for (int64_t i = stage * kBlocks / stages; i < (stage + 1) * kBlocks / stages; ++i)
      blocks->push_back(nn::Sequential(nn::LayerNorm(nn::LayerNormOptions({kWidth})), nn::Linear(kWidth, 128),
                                       nn::GELU(), nn::Linear(128, kWidth)));
    if (stage + 1 == stages) head = register_module("head", nn::Linear(kWidth, kClasses));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = input ? input(x) : x;
    for (const auto& block : *blocks) y = y + block->as<nn::Sequential>()->forward(y);
    return head ? head(y) : y;
  }
  nn::Linear input{nullptr}, head{nullptr};
  nn::ModuleList blocks{register_module("blocks", nn::ModuleList())};
};

/// Points around four corners: the number of its corner is the label of a point.
std::pair<at::Tensor, at::Tensor> points(int64_t count, at::Device device) {
  const at::Tensor labels = at::randint(kClasses, {count}, at::kLong);
  const at::Tensor corners = at::one_hot(labels, kInput).to(at::kFloat) * 2.0;
  return {(at::randn({count, kInput}) + corners).to(device), labels.to(device)};
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& labels) {
  return nn::functional::cross_entropy(logits, labels);
}

int main(int argc, char** argv) try {
  const std::string name = argc > 1 ? argv[1] : "1f1b";
  const auto known = plan::parse<plan::ScheduleName>(name);
  if (!known)
    throw std::runtime_error("there is no schedule '" + name + "'; 'trireme pipeline compare' lists them");
  const auto world = trireme::comm::World::join_environment();
  plan::ParallelConfig axes;
  axes.pp = world->size();
  const auto mesh = trireme::comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
  const auto schedule =
      plan::make_schedule(*known, {world->size(), kMicroBatches, argc > 2 ? std::stoll(argv[2]) : 1});
  torch::manual_seed(1);
  std::vector<parallel::Stage> stages;
  for (const int64_t stage : schedule.stages_of(mesh.pp_rank)) {
    auto part = std::make_shared<Part>(stage, schedule.stages);
    part->to(world->device());
    stages.push_back(parallel::make_stage(stage, part));
  }
  parallel::Pipeline pipeline(schedule, stages, loss_of, mesh);
  const auto optimizers =
      pipeline.optimizers([](auto params) { return trireme::optim::adamw(std::move(params), {.lr = 3e-3}); });
  torch::manual_seed(100 + mesh.dp_rank);  // ranks of one pipeline draw the same points
  double first = 0.0, last = 0.0;
  for (int step = 0; step < 60; ++step) {
    const auto [inputs, labels] = points(64, world->device());
    last = pipeline.forward_backward(inputs, labels).item<double>();
    pipeline.clip_grad_norm(1.0);
    pipeline.step(optimizers);
    if (step == 0) first = last;
  }
  if (world->rank() == 0)
    std::cout << name << " on " << world->size() << " ranks: loss " << first << " -> " << last << "\n";
  return last < 0.5 * first ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
