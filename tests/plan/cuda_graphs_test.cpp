// What a config says about recording its passes: nothing in it may wait for others, come from the host or
// move.
#include "trireme/plan/cuda_graphs.h"

#include <gtest/gtest.h>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/plan/model_family.h"

namespace trireme::plan {
namespace {

Config config_with(const std::vector<std::string>& overrides) {
  return load({.overrides = overrides}, Environment()).config;
}

TEST(CudaGraphs, AreMadeWhereTheyPayUnlessAskedForOrNot) {
  EXPECT_EQ(config_with({}).train.cuda_graphs, CudaGraphs::kAuto);
  EXPECT_EQ(config_with({"train.cuda_graphs=off"}).train.cuda_graphs, CudaGraphs::kOff);
  EXPECT_EQ(config_with({"train.cuda_graphs=on"}).train.cuda_graphs, CudaGraphs::kOn);
  EXPECT_EQ(load({.text = "train:\n  cuda_graphs: on\n"}, Environment()).config.train.cuda_graphs,
            CudaGraphs::kOn)
      << "YAML's other word for true stays a word";
  EXPECT_THROW(config_with({"train.cuda_graphs=true"}), ConfigError);
}

TEST(CudaGraphs, EveryFamilyAndPolicyCanBeRecordedOnAnyNumberOfGpus) {
  for (const ModelFamily family : language_families()) {
    for (const char* policy : {"ddp", "zero2", "fsdp"}) {
      for (const char* compute : {"fp32", "bf16"}) {
        const Config config =
            config_with({fmt::format("model.family={}", family), fmt::format("parallel.policy={}", policy),
                         fmt::format("precision.compute={}", compute), "train.micro_batch=2"});
        for (const int64_t ranks : {1, 2, 8}) {
          EXPECT_EQ(cuda_graphs_obstacle(config, true, ranks), "")
              << name(family) << " " << policy << " " << compute << " " << ranks;
        }
      }
    }
  }
  EXPECT_EQ(cuda_graphs_obstacle(config_with({"model.dropout=0.1"}), true, 1), "");
  EXPECT_EQ(cuda_graphs_obstacle(config_with({"memory.recompute=block"}), true, 1), "");
  EXPECT_EQ(cuda_graphs_obstacle(config_with({"model.preset=resnet18-cifar"}), true, 2), "");
  EXPECT_EQ(cuda_graphs_obstacle(config_with({"model.dropout=0.1", "memory.recompute=cheap"}), true, 1), "");
}

TEST(CudaGraphs, OneOddReadingDoesNotDecideWhetherTheDeviceWaits) {
  EXPECT_TRUE(device_waits_for_host({0.02, 0.03, 0.02}));
  EXPECT_TRUE(device_waits_for_host({0.02, 7.0, 0.03})) << "the host lost its core while it waited";
  EXPECT_TRUE(device_waits_for_host({0.3, 0.35, 0.28}))
      << "a host that leads by so little falls behind at times";
  EXPECT_FALSE(device_waits_for_host({0.8, 0.7, 0.9}));
  EXPECT_FALSE(device_waits_for_host({8.0, 7.5, 8.1}));
  EXPECT_FALSE(device_waits_for_host({8.0, 0.01, 8.1})) << "the host lost its core while it enqueued";
  EXPECT_FALSE(device_waits_for_host({})) << "nothing is known";
}

TEST(CudaGraphs, WhatStaysForThemLeavesRoomForActivations) {
  EXPECT_TRUE(may_stay(0, 0));
  EXPECT_TRUE(may_stay(int64_t{1} << 30, int64_t{8} << 30));
  EXPECT_FALSE(may_stay(int64_t{4} << 30, int64_t{8} << 30));
}

TEST(CudaGraphs, EveryObstacleIsNamed) {
  struct Case {
    std::vector<std::string> overrides;
    bool gpu;
    int64_t ranks;
    const char* named;
  };
  const std::vector<Case> cases = {
      {{}, false, 1, "CPU"},
      {{"parallel.reduce_when=every_micro_batch"}, true, 2, "parallel.reduce_when=every_micro_batch"},
      {{"model.preset=resnet18-cifar", "model.norm=sync_batch"}, true, 2, "model.norm=sync_batch"},
      {{"model.preset=llama-1b", "precision.compute=bf16", "precision.fp8=rowwise"},
       true,
       2,
       "precision.fp8=rowwise"},
      {{"precision.compute=fp16"}, true, 1, "precision.scaling"},
      {{"precision.compute=bf16", "precision.scaling=dynamic"}, true, 1, "precision.scaling"},
      {{"precision.compute=fp16", "precision.scaling=none"}, true, 1, "precision.reduce=auto"},
      {{"precision.compute=bf16", "precision.reduce=fp32"}, true, 1, "precision.reduce=fp32"},
      {{"parallel.comm_hook=topk"}, true, 1, "parallel.comm_hook=topk"},
      {{"parallel.comm_hook=local_sgd", "parallel.policy=ddp"}, true, 1, "parallel.comm_hook=local_sgd"},
      {{"parallel.reduce_when=every_micro_batch"}, true, 1, "parallel.reduce_when=every_micro_batch"},
      {{"memory.recompute=block", "model.dropout=0.1"}, true, 1, "memory.recompute=block"},
      {{"data.reset_attention=true"}, true, 1, "data.reset_attention=true"},
      {{"memory.recompute=all_but_attention", "adapter.kind=lora", "adapter.dropout=0.1"},
       true,
       1,
       "memory.recompute=all_but_attention with adapter.dropout"},
      {{fmt::format("train.steps={}", kStepsBeforeRecording)}, true, 1, "train.steps=4"},
  };
  for (const Case& one : cases) {
    const std::string obstacle = cuda_graphs_obstacle(config_with(one.overrides), one.gpu, one.ranks);
    EXPECT_NE(obstacle.find(one.named), std::string::npos) << one.named << " in: " << obstacle;
  }
}

}  // namespace
}  // namespace trireme::plan
