#pragma once
// A net with buffers and a tied matrix, and the optimizers and layouts under which tests save and load it.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/nn/modules/batchnorm.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/parallel/layouts.h"
#include "tests/support/spawn.h"

namespace trireme::test {

inline std::string scratch(const std::string& name) {
  const auto folder =
      std::filesystem::temp_directory_path() / fmt::format("trireme-state-test-{}", ::getpid());
  std::filesystem::create_directories(folder);
  return (folder / name).string();
}

/// A net with the buffers of a BatchNorm, of which one is an integer, and a matrix under two names.
struct NormedNet : Net {
  explicit NormedNet(uint64_t seed) : Net(seed), norm(kWidth) {
    register_module("norm", norm);
    register_parameter("tied", blocks[0]->w1);
  }
  at::Tensor forward(at::Tensor x) const override {
    const at::Tensor mean = x.to(at::kFloat).mean(0), variance = x.to(at::kFloat).var(0);
    at::Tensor(norm->running_mean).mul_(0.9).add_(mean.detach() * 0.1);
    at::Tensor(norm->running_var).mul_(0.9).add_(variance.detach() * 0.1);
    at::Tensor(norm->num_batches_tracked).add_(1);
    return Net::forward(x * norm->weight + norm->bias);
  }
  torch::nn::BatchNorm1d norm;
};

inline constexpr int64_t kParams = 15, kBuffers = 3;  // four blocks of three, a head, the norm's two

inline plan::OptimConfig adamw() {
  plan::OptimConfig config;
  config.lr = 0.01;
  return config;
}
inline plan::OptimConfig momentum() {
  plan::OptimConfig config = descent(0.01);
  config.momentum = 0.9;
  return config;
}

/// Calls body(layout, world, label) on every rank of every layout.
template <typename Body>
void on_layouts_of(const std::vector<int64_t>& numbers_of_ranks, const Body& body) {
  at::set_num_threads(1);
  for (const int64_t ranks : numbers_of_ranks) {
    for (const Layout& layout : layouts(ranks)) {
      run_ranks(ranks, [&](std::shared_ptr<comm::World> world) { body(layout, world, layout.label(ranks)); });
    }
  }
}

}  // namespace trireme::test
