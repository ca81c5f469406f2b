#include "trireme/bench/toy_pipeline.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/kernels/device.h"
#include "trireme/nn/layers.h"
#include "trireme/optim/optimizer.h"
#include "trireme/plan/stages.h"

namespace trireme::bench {
namespace {

constexpr int64_t kFeatures = 50;  ///< of a row, in and out

at::Generator generator(int64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
}

/// Layers [first, last) of `depth` hidden layers with ReLU and one back to the features.
class ToyStage : public torch::nn::Module {
 public:
  ToyStage(const ToyPipelineRun& run, int64_t first, int64_t last) : depth_(run.depth), first_(first) {
    const at::NoGradGuard no_grad;
    for (int64_t layer = first; layer < last; ++layer) {
      const int64_t in = layer == 0 ? kFeatures : run.width, out = layer == run.depth ? kFeatures : run.width;
      layers_.push_back(std::make_shared<nn::Linear>(in, out, /*with_bias=*/true));
      register_module(fmt::format("layer{:03}", layer), layers_.back());
      // The layer's own numbers: the same whatever the stages.
      at::Generator numbers = generator(run.seed * 1000 + layer);
      const double bound = 1.0 / std::sqrt(static_cast<double>(in));
      layers_.back()->weight.uniform_(-bound, bound, numbers);
      layers_.back()->bias.uniform_(-bound, bound, numbers);
    }
  }
  at::Tensor forward(const at::Tensor& x) const {
    at::Tensor y = x;
    for (size_t i = 0; i < layers_.size(); ++i) {
      y = layers_[i]->forward(y);
      if (first_ + static_cast<int64_t>(i) < depth_) y = y.relu();
    }
    return y;
  }

 private:
  int64_t depth_, first_;
  std::vector<std::shared_ptr<nn::Linear>> layers_;
};

/// Layers of the stages by what they cost.
plan::StageSplit split_of(const ToyPipelineRun& run, int64_t stages) {
  std::vector<plan::StagePart> parts;
  for (int64_t layer = 0; layer <= run.depth; ++layer) {
    const double in = static_cast<double>(layer == 0 ? kFeatures : run.width),
                 out = static_cast<double>(layer == run.depth ? kFeatures : run.width);
    parts.push_back({.name = fmt::format("layer {}", layer), .flops = 2.0 * in * out});
  }
  return plan::split_by_cost(parts, stages);
}

comm::Mesh pipeline_mesh(const std::shared_ptr<comm::World>& world) {
  plan::ParallelConfig axes;
  axes.pp = world->size();
  return comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
}

}  // namespace

ToyPipelineArm::ToyPipelineArm(const std::shared_ptr<comm::World>& world, const ToyPipelineRun& run,
                               const ToyPipelineMode& given)
    : mode(given), world_(world), mesh_(pipeline_mesh(world)) {
  const auto name = plan::parse<plan::ScheduleName>(run.schedule);
  TRIREME_CHECK(name, "[bench.toy_pipeline] the request has no valid schedule: '{}'", run.schedule);
  simulated_ = plan::make_windowed_schedule(*name, {run.ranks, mode.micro_batches, 1}, mode.window);
  const plan::Schedule schedule = run.study ? plan::on_one_rank(simulated_) : simulated_;
  const plan::StageSplit split = split_of(run, schedule.stages);
  std::vector<parallel::Stage> stages;
  for (const int64_t stage : schedule.stages_of(mesh_.pp_rank)) {
    const auto at = static_cast<size_t>(stage);
    const auto module = std::make_shared<ToyStage>(run, split.first[at], split.first[at + 1]);
    module->to(world->device());
    stages.push_back(parallel::make_stage(stage, module));
  }
  parallel::PipelineOptions options;
  options.blocking_sends = mode.blocking;
  options.record = true;
  const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).square().mean();
  };
  pipeline_ = std::make_unique<parallel::Pipeline>(schedule, std::move(stages), loss, mesh_, options);
  optimizers_ = pipeline_->optimizers([&](std::vector<optim::FlatParam> params) {
    return optim::adamw(std::move(params), {.lr = run.lr, .weight_decay = 0.0});
  });
}

double ToyPipelineArm::step(const ToyPipelineRun& run, int64_t number, bool measured) {
  at::Generator numbers = generator(run.seed + number);
  const auto rows = [&] {
    return at::randn({run.batch_size, kFeatures}, numbers, at::kFloat).to(world_->device());
  };
  const at::Tensor inputs = rows(), targets = rows();
  if (world_->device().is_cuda()) kernels::synchronize_gpu();
  mesh_.all->barrier();
  const double begin = monotonic_seconds();
  const at::Tensor loss = pipeline_->forward_backward(inputs, targets);
  pipeline_->step(optimizers_);
  if (world_->device().is_cuda()) kernels::synchronize_gpu();
  const double seconds = monotonic_seconds() - begin;
  const double value = loss.item<double>();
  if (!measured) return value;
  double slowest = 0.0;
  for (const auto& rank : comm::gather_scalars(*mesh_.all, {1e3 * seconds}))
    slowest = std::max(slowest, rank[0]);
  samples_ms.push_back(slowest);
  losses.push_back(value);
  reports_.push_back(pipeline_->report(simulated_));
  return value;
}

const plan::PipelineReport& ToyPipelineArm::median_report() const {
  std::vector<const plan::PipelineReport*> sorted;
  for (const plan::PipelineReport& report : reports_) sorted.push_back(&report);
  std::ranges::sort(sorted, {}, [](const plan::PipelineReport* report) { return report->measured.seconds; });
  return *sorted[sorted.size() / 2];
}

}  // namespace trireme::bench
