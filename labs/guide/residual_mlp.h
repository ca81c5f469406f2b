#pragma once
// The network and the data of the programs beside this file.
#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <utility>

#include "trireme/comm/mesh.h"

/// Eight residual blocks of two layers, and a head: 1.05 million parameters, nearly all of them in blocks.
struct ResidualMlp : torch::nn::Module {
  static constexpr int64_t kWidth = 256, kBlocks = 8, kClasses = 4;

  struct Block : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return x + out(at::gelu(in(x))); }
    torch::nn::Linear in{register_module("in", torch::nn::Linear(kWidth, kWidth))};
    torch::nn::Linear out{register_module("out", torch::nn::Linear(kWidth, kWidth))};
  };

  ResidualMlp() {
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(std::make_shared<Block>());
  }
  /// (rows, kWidth) -> (rows, kClasses)
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(x);
  }
  torch::nn::ModuleList blocks{register_module("blocks", torch::nn::ModuleList())};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(kWidth, kClasses))};
};

/// This rank's part of `rows` samples: noise that is a little larger in one quarter, whose number is the
/// label (rows).
inline std::pair<at::Tensor, at::Tensor> samples(int64_t step, int64_t rows,
                                                 const trireme::comm::Mesh& mesh) {
  at::manual_seed(static_cast<uint64_t>(1000 + step));
  const at::Tensor labels = at::randint(ResidualMlp::kClasses, {rows}, at::kLong);
  const at::Tensor quarter = at::one_hot(labels, ResidualMlp::kClasses).repeat_interleave(64, 1);
  const at::Tensor x = at::randn({rows, ResidualMlp::kWidth}) + 0.1 * quarter;
  const auto part = [&](const at::Tensor& all) {
    return all.tensor_split(mesh.dp->size())[static_cast<size_t>(mesh.dp_rank)].to(mesh.world->device());
  };
  return {part(x), part(labels)};
}
