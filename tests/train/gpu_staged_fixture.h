#pragma once
// Runs on several GPUs, one process each, beside those on one of them.
#include <cstdlib>

#include "tests/comm/gpu_ranks.h"
#include "tests/train/staged_fixture.h"

namespace trireme::train {

class GpuRanksTest : public StagedTest {
 protected:
  /// Skips with fewer GPUs.
  void set_up_on(int64_t gpus) {
    if (test::count_gpus() < gpus) GTEST_SKIP() << gpus << " GPUs are needed";
    StagedTest::SetUp();
    config_.device = plan::Device::kCuda;
  }
  void TearDown() override {
    if (!folder_.empty()) TrainerTest::TearDown();
  }

  /// NCCL's kernels wait for the other GPU, which may wait for a kernel that is still to be loaded.
  static void load_kernels_at_once() { ::setenv("CUDA_MODULE_LOADING", "EAGER", 1); }

  /// On the rank that makes the records and the file; nothing on others.
  Outcome outcome_on(const std::shared_ptr<comm::World>& world) {
    recorder_ = {};
    train(options(), world);
    if (world->rank() != 0) return {};
    const checkpoint::SafetensorsReader reader((folder_ / "weights.safetensors").string());
    Outcome result{recorder_, {}, reader.metadata()};
    for (const auto& [name, info] : reader.tensors()) result.weights[name] = reader.read(name);
    return result;
  }

  int64_t port_ = test::free_port();
};

}  // namespace trireme::train
