#pragma once
// A model of blocks cut into the stages of a pipeline, and the same model in one piece to compare with.
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/parallel/plain_net.h"
#include "tests/support/spawn.h"
#include "trireme/memory/recompute.h"
#include "trireme/parallel/pipeline.h"

namespace trireme::test {

inline constexpr int64_t kBlocks = 16;
inline constexpr int64_t kRows = 48;  ///< of a step, over all data-parallel ranks
inline constexpr int64_t kPipelineSteps = 5;

/// What a test trains; the same weights and data whatever the layout.
struct PipelineRun {
  plan::ScheduleName schedule = plan::ScheduleName::k1F1B;
  int64_t pp = 2, dp = 1, chunks = 1, micro_batches = 8;
  std::string policy = "ddp";
  int64_t replicas = 1;
  bool tied = false, recompute = false;
  double clip = 0.0;
  at::ScalarType compute = at::kFloat;
  std::set<int64_t> frozen_steps = {};  ///< in which the embeddings are frozen, and a head that is tied
  std::vector<parallel::TiedParameter> more_ties = {};

  std::string label() const {
    return fmt::format(
        "{} on {} x {} ranks, {} chunks, {}{}{}{}{}", plan::name(schedule), pp, dp, chunks, policy,
        tied ? ", tied" : "", recompute ? ", recompute" : "", clip > 0.0 ? ", clipped" : "",
        frozen_steps.empty() ? "" : fmt::format(", frozen in {}", fmt::join(frozen_steps, " ")));
  }
};

/// Blocks [first, last); the first stage begins with x E, the last one ends with y H, where H may be E again.
struct BlockStage : torch::nn::Module {
  BlockStage(int64_t first, int64_t last, bool tied, bool recompute) : recomputes(recompute) {
    constexpr int64_t kWidth = Net::kWidth;
    if (first == 0) embed = register_parameter("embed", random(7, {kWidth, kWidth}, 0.5));
    for (int64_t i = first; i < last; ++i) {
      blocks.push_back(std::make_shared<Block>(100 * static_cast<uint64_t>(i + 1), kWidth));
      register_module(fmt::format("block{:02}", i), blocks.back());
    }
    // A tied head starts with other values than the embeddings: the pipeline makes them equal.
    if (last == kBlocks && !(tied && first == 0))
      head = register_parameter("head", random(tied ? 8 : 9, {kWidth, kWidth}, 0.5));
    if (last == kBlocks && tied && first == 0) head = embed;
  }
  at::Tensor run(const at::Tensor& x) const {
    at::Tensor y = embed.defined() ? at::matmul(x, embed) : x;
    for (const auto& block : blocks) {
      y = recomputes ? memory::recomputed(y, [block](const at::Tensor& z) { return block->forward(z); })
                     : block->forward(y);
    }
    return head.defined() ? at::matmul(y, head) : y;
  }
  virtual at::Tensor forward(const at::Tensor& x) { return run(x); }
  void begin_step(const PipelineRun& run, int64_t step) const {
    for (at::Tensor param : {embed, run.tied ? head : at::Tensor()})
      if (param.defined()) param.requires_grad_(!run.frozen_steps.contains(step));
  }

  bool recomputes;
  at::Tensor embed, head;
  std::vector<std::shared_ptr<Block>> blocks;
};

inline at::Tensor batch(uint64_t kind, int64_t step) {
  return random(kind + static_cast<uint64_t>(step), {kRows, Net::kWidth});
}
inline at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

struct PipelineOutcome {
  Weights weights;
  std::vector<double> losses, norms;
};

/// Stages of `rank` under the schedule, of equal numbers of blocks.
inline std::vector<std::shared_ptr<BlockStage>> stages_of(const plan::Schedule& schedule, int64_t rank,
                                                          const PipelineRun& run,
                                                          std::vector<parallel::Stage>& stages) {
  std::vector<std::shared_ptr<BlockStage>> modules;
  for (const int64_t stage : schedule.stages_of(rank)) {
    const auto cut = [&](int64_t i) { return i * kBlocks / schedule.stages; };
    modules.push_back(std::make_shared<BlockStage>(cut(stage), cut(stage + 1), run.tied, run.recompute));
    stages.push_back(parallel::make_stage(stage, modules.back()));
  }
  return modules;
}

inline comm::Mesh mesh_of(const std::shared_ptr<comm::World>& world, const PipelineRun& run) {
  plan::ParallelConfig axes;
  axes.pp = run.pp;
  axes.dp_replicate = run.replicas;
  return comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
}

inline parallel::PipelineOptions options_of(const PipelineRun& run, const plan::Schedule& schedule) {
  parallel::PipelineOptions options;
  options.data_parallel = {.policy = run.policy, .compute = run.compute};
  options.data_parallel.min_unit_numel = 100;
  if (run.tied && schedule.stages > 1)
    options.tied = {{.stage = 0, .name = "embed", .other_stage = schedule.stages - 1, .other_name = "head"}};
  options.tied.insert(options.tied.end(), run.more_ties.begin(), run.more_ties.end());
  return options;
}

inline plan::Schedule schedule_of(const PipelineRun& run) {
  return plan::make_schedule(run.schedule, {run.pp, run.micro_batches, run.chunks});
}

inline PipelineOutcome train(const PipelineRun& run) {
  PipelineOutcome outcome;
  std::mutex mutex;
  const plan::Schedule schedule = schedule_of(run);
  run_ranks(run.pp * run.dp, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = mesh_of(world, run);
    std::vector<parallel::Stage> stages;
    const auto modules = stages_of(schedule, mesh.pp_rank, run, stages);
    const auto begin_step = [&](int64_t step) {
      for (const auto& module : modules) module->begin_step(run, step);
    };
    begin_step(0);
    parallel::Pipeline pipeline(schedule, stages, squared_error, mesh, options_of(run, schedule));
    const auto make = [](std::vector<optim::FlatParam> params) {
      return optim::build(descent(0.05), std::move(params));
    };
    auto optimizers = pipeline.optimizers(make);
    for (int64_t step = 0; step < kPipelineSteps; ++step) {
      begin_step(step);
      const bool thawed = run.frozen_steps.contains(0) && !run.frozen_steps.contains(step);
      if (thawed && run.frozen_steps.contains(step - 1)) optimizers = pipeline.optimizers(make);
      const auto mine = [&](const at::Tensor& rows) {
        return rows.chunk(run.dp)[static_cast<size_t>(mesh.dp_rank)].to(run.compute);
      };
      const at::Tensor loss = pipeline.forward_backward(mine(batch(3000, step)), mine(batch(4000, step)));
      const double norm = run.clip > 0.0 ? pipeline.clip_grad_norm(run.clip) : pipeline.grad_norm();
      pipeline.step(optimizers);
      if (world->rank() != 0) continue;
      outcome.losses.push_back(loss.item<double>());
      outcome.norms.push_back(norm);
    }
    for (const auto& engine : pipeline.engines()) {
      const Weights weights = weights_of(*engine);
      const std::lock_guard lock(mutex);
      for (const auto& [name, weight] : weights) {
        const auto [place, is_new] = outcome.weights.emplace(name, weight);
        EXPECT_TRUE(is_new || at::equal(place->second, weight)) << run.label() << ": copies of " << name;
      }
    }
  });
  return outcome;
}

/// The model in one piece by plain autograd.
inline PipelineOutcome train_unpipelined(const PipelineRun& run) {
  BlockStage model(0, kBlocks, run.tied, /*recompute=*/false);
  PipelineOutcome outcome;
  const int64_t parts = run.micro_batches * run.dp;
  for (int64_t step = 0; step < kPipelineSteps; ++step) {
    model.zero_grad();
    model.begin_step(run, step);
    const auto inputs = batch(3000, step).chunk(parts), targets = batch(4000, step).chunk(parts);
    double sum = 0.0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor loss = squared_error(model.forward(inputs[i]), targets[i]);
      (loss / static_cast<double>(parts)).backward();
      sum += loss.item<double>();
    }
    outcome.losses.push_back(sum / static_cast<double>(parts));
    const at::NoGradGuard no_grad;
    double squares = 0.0;
    std::vector<at::Tensor> trained;
    for (const auto& [name, param] : parameters_of(model))
      if (param.requires_grad()) trained.push_back(param);
    for (const at::Tensor& param : trained)
      squares += param.grad().to(at::kDouble).square().sum().item<double>();
    outcome.norms.push_back(std::sqrt(squares));
    const double factor = run.clip > 0.0 ? optim::clip_factor(std::sqrt(squares), run.clip) : 1.0;
    for (const at::Tensor& param : trained) param.sub_(param.grad() * (0.05 * factor));
  }
  outcome.weights = copies(parameters_of(model));
  if (run.tied) outcome.weights["head"] = outcome.weights.at("embed");
  return outcome;
}

}  // namespace trireme::test
