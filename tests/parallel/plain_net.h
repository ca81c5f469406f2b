#pragma once
// A module that knows nothing of the engine, and its training by plain autograd to compare with.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/support/refusal.h"
#include "trireme/base/hash.h"
#include "trireme/parallel/wrap.h"

namespace trireme::test {

inline at::Tensor random(uint64_t seed, at::IntArrayRef shape, double scale = 1.0) {
  at::Tensor values = at::empty(shape, at::kFloat);
  auto* const out = values.mutable_data_ptr<float>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    out[i] = static_cast<float>(
        scale * (static_cast<double>(mix64(seed, static_cast<uint64_t>(i)) >> 11) * 0x1p-53 * 2.0 - 1.0));
  }
  return values;
}

/// relu(x W1 + b1) W2 + x.
struct Block : torch::nn::Module {
  /// With `shared` as its first matrix, or one of its own.
  Block(uint64_t seed, int64_t width, const at::Tensor& shared = {}) {
    w1 = register_parameter("w1", shared.defined() ? shared : random(seed, {width, width}, 0.3));
    b1 = register_parameter("b1", random(seed + 1, {width}, 0.1));
    w2 = register_parameter("w2", random(seed + 2, {width, width}, 0.3));
  }
  at::Tensor forward(const at::Tensor& x) const {
    return x + at::matmul(at::relu(at::matmul(x, w1) + b1), w2);
  }
  at::Tensor w1, b1, w2;
};

struct ModuleListImpl : torch::nn::Module {};  // a container by its name, as torch::nn::ModuleList is

/// Four blocks, of which the second may run twice, then a head.
struct Net : torch::nn::Module {
  explicit Net(uint64_t seed, bool twice = false) : runs_twice(twice) {
    auto list = std::make_shared<ModuleListImpl>();
    for (uint64_t i = 0; i < 4; ++i) {
      blocks.push_back(std::make_shared<Block>(seed + 10 * i, kWidth));
      list->register_module(std::to_string(i), blocks.back());
    }
    register_module("blocks", list);
    head = register_parameter("head", random(seed + 99, {kWidth, 3}, 0.3));
  }
  virtual at::Tensor forward(at::Tensor x) const {
    for (const auto& block : blocks) x = block->forward(x);
    if (runs_twice) x = blocks[1]->forward(x);
    return at::matmul(x, head);
  }
  static constexpr int64_t kWidth = 10;
  bool runs_twice;
  std::vector<std::shared_ptr<Block>> blocks;
  at::Tensor head;
};

inline constexpr int64_t kBatch = 12;
inline constexpr int64_t kSteps = 6;

inline at::Tensor inputs(int64_t step) {
  return random(1000 + static_cast<uint64_t>(step), {kBatch, Net::kWidth});
}
inline at::Tensor targets(int64_t step) {
  return random(2000 + static_cast<uint64_t>(step), {kBatch, 3});
}
inline at::Tensor loss_sum(const Net& net, const at::Tensor& x, const at::Tensor& y) {
  return (net.forward(x) - y).square().sum();
}

using Weights = std::map<std::string, at::Tensor>;

/// Every tensor once, by its first name.
inline Weights parameters_of(const torch::nn::Module& module) {
  Weights params;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& entry : module.named_parameters()) {
    if (seen.insert(entry.value().unsafeGetTensorImpl()).second) params[entry.key()] = entry.value();
  }
  return params;
}

inline Weights copies(Weights weights) {
  for (auto& [name, weight] : weights) weight = weight.detach().clone();
  return weights;
}

/// Plain gradient descent with plain autograd.
inline Weights reference(Net& net, double lr = 0.05) {
  for (int64_t step = 0; step < kSteps; ++step) {
    net.zero_grad();
    (loss_sum(net, inputs(step), targets(step)) / static_cast<double>(kBatch)).backward();
    const at::NoGradGuard no_grad;
    for (auto& [name, param] : parameters_of(net)) {
      if (param.grad().defined()) at::Tensor(param).sub_(param.grad() * lr);
    }
  }
  return copies(parameters_of(net));
}

inline std::unique_ptr<parallel::DataParallel> wrap(Net& net, const comm::Mesh& mesh,
                                                    parallel::WrapOptions options) {
  const bool shards = plan::find_policy(options.policy).shard_parameters;
  return shards ? parallel::fully_shard(net, mesh, options) : parallel::data_parallel(net, mesh, options);
}

inline Weights weights_of(parallel::DataParallel& engine) {
  Weights weights;
  engine.visit_weights(
      [&](const std::string& name, const at::Tensor& weight) { weights[name] = weight.clone(); });
  return weights;
}

inline void expect_close(const Weights& got, const Weights& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size());
  for (const auto& [name, weight] : wanted) {
    const double difference = (got.at(name) - weight).norm().item<double>();
    EXPECT_LT(difference, 1e-5 * weight.norm().item<double>()) << what << ": " << name;
  }
}

inline plan::OptimConfig descent(double lr) {
  plan::OptimConfig config;
  config.name = plan::OptimizerName::kSgd;
  config.lr = lr;
  config.momentum = 0.0;
  config.weight_decay = 0.0;
  return config;
}

/// Trains `net` on this rank's rows and returns the weights.
inline Weights train(Net& net, parallel::DataParallel& engine, const comm::Mesh& mesh, double lr = 0.05) {
  const auto optimizer = optim::build(descent(lr), engine.optimizer_params());
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor x = inputs(step).chunk(mesh.dp->size())[rank],
                     y = targets(step).chunk(mesh.dp->size())[rank];
    const auto rows = static_cast<double>(x.size(0));
    engine.backward(loss_sum(net, x, y) / rows, rows);
    engine.step(*optimizer);
  }
  return weights_of(engine);
}

inline comm::Mesh mesh_of(const std::shared_ptr<comm::World>& world) {
  return comm::make_mesh(world, plan::MeshShape::fit({}, world->size()));
}

}  // namespace trireme::test
