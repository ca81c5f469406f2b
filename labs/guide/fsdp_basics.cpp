// One network and the same batches under DDP and under FSDP in several ways: what a rank keeps between steps,
// has whole at once, sends and waits for. trireme launch -n 4 ./fsdp_basics
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "residual_mlp.h"
#include "trireme/parallel/wrap.h"

namespace comm = trireme::comm;
namespace parallel = trireme::parallel;

constexpr int64_t kRows = 64, kSteps = 6;

/// A way to train.
struct Way {
  std::string name;
  parallel::WrapOptions options = {};
  int64_t replicas = 1;       ///< of the sharded model: hybrid sharding
  int64_t micro_batches = 1;  ///< more: gradients are accumulated, and reduced once
};

/// What it took on this rank.
struct Figures {
  int64_t kept = 0;    ///< bytes from step to step: parameters, gradients, moments
  int64_t whole = 0;   ///< bytes of parameters that a step has whole at once at most
  int64_t sent = 0;    ///< bytes a step
  double step_ms = 0;  ///< median
  double hidden = 0;   ///< share of communication that ran behind computation
  std::string weights;
};

void train_step(ResidualMlp& net, parallel::DataParallel& engine, trireme::optim::Optimizer& optimizer,
                const comm::Mesh& mesh, int64_t step, int64_t micro_batches) {
  const auto [x, y] = samples(step, kRows, mesh);
  const auto parts_of_x = x.chunk(micro_batches), parts_of_y = y.chunk(micro_batches);
  for (size_t part = 0; part < parts_of_x.size(); ++part) {
    const at::Tensor loss = at::cross_entropy_loss(net.forward(parts_of_x[part]), parts_of_y[part]);
    part + 1 < parts_of_x.size() ? engine.accumulate(loss) : engine.backward(loss);
  }
  engine.clip_grad_norm(1.0);
  engine.step(optimizer);
}

Figures measure(const std::shared_ptr<comm::World>& world, const Way& way) {
  trireme::plan::ParallelConfig parallel;
  parallel.dp_replicate = way.replicas;
  const auto mesh = comm::make_mesh(world, trireme::plan::MeshShape::fit(parallel, world->size()));
  at::manual_seed(1);
  ResidualMlp net;
  const auto engine = way.options.policy == "ddp" ? parallel::data_parallel(net, mesh, way.options)
                                                  : parallel::fully_shard(net, mesh, way.options);
  const auto optimizer = trireme::optim::adamw(engine->optimizer_params(), {.lr = 1e-3});
  Figures figures;
  std::vector<double> step_ms;
  parallel::CommTimes times;
  engine->measure(true);
  for (int64_t step = 0; step < kSteps; ++step) {
    const int64_t sent_before = engine->sent_bytes();
    const auto began = std::chrono::steady_clock::now();
    train_step(net, *engine, *optimizer, mesh, step, way.micro_batches);
    times += engine->take_times();  // on a GPU the host waits here
    step_ms.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
    figures.sent = engine->sent_bytes() - sent_before;
  }
  std::nth_element(step_ms.begin(), step_ms.begin() + kSteps / 2, step_ms.end());
  figures.step_ms = step_ms[kSteps / 2];
  figures.hidden = times.hidden_share();
  figures.kept = engine->state_bytes().total() + optimizer->state_bytes();
  figures.whole = engine->most_gathered_bytes();
  figures.weights = parallel::weights_digest(*engine);
  return figures;
}

std::vector<Way> ways(int64_t ranks) {
  std::vector<Way> found = {{.name = "ddp", .options = {.policy = "ddp"}},
                            {.name = "fsdp"},
                            {.name = "fsdp, no overlap", .options = {.overlap = false}},
                            {.name = "fsdp, gathered once", .options = {.policy = "fsdp:shard_grad_op"}}};
  if (ranks >= 4 && ranks % 2 == 0)
    found.push_back({.name = "fsdp, 2 replicas", .options = {.policy = "fsdp:hybrid_shard"}, .replicas = 2});
  found.push_back({.name = "ddp, 4 micro-batches", .options = {.policy = "ddp"}, .micro_batches = 4});
  found.push_back({.name = "fsdp, 4 micro-batches", .micro_batches = 4});
  return found;
}

int main() try {
  const auto world = comm::World::join_environment();
  const bool speaks = world->rank() == 0;
  if (speaks)
    fmt::print("{:<22}{:>10}{:>15}{:>13}{:>12}{:>8}  weights\n", "", "kept", "whole at once", "sent a step",
               "step", "hidden");
  std::map<int64_t, std::string>
      weights;  // by the number of micro-batches, which decides what is added up first
  bool same = true;
  for (const Way& way : ways(world->size())) {
    const Figures figures = measure(world, way);
    const auto kib = [](int64_t bytes) { return fmt::format("{} KiB", bytes / 1024); };
    if (speaks)
      fmt::print("{:<22}{:>10}{:>15}{:>13}{:>9.2f} ms{:>7.0f}%  {}\n", way.name, kib(figures.kept),
                 kib(figures.whole), kib(figures.sent), figures.step_ms, 100.0 * figures.hidden,
                 figures.weights);
    same = same && weights.emplace(way.micro_batches, figures.weights).first->second == figures.weights;
  }
  if (speaks)
    fmt::print("{}\n",
               same ? "equal weights, bit for bit, for one number of micro-batches" : "the weights differ");
  return same ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
