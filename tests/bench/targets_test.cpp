// The registry of targets: names, spellings and refusals, and that every arm can be planned.
#include "trireme/bench/target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/bench/sample.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/pipeline.h"

namespace trireme::bench {
namespace {

std::string name_of(const std::string& word) {
  const std::vector<Choice> found = find_targets(word);
  return found.size() == 1 ? found[0].target->name : std::to_string(found.size()) + " targets";
}

std::string refusal_of(const std::string& word) {
  try {
    find_targets(word);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Targets, AreFoundByEverySpelling) {
  const std::pair<const char*, const char*> spellings[] = {
      {"ddp", "ddp"},
      {"train:ddp", "ddp"},
      {"ddp.py", "ddp"},
      {"baseline_ddp.py", "ddp"},
      {"optimized_ddp.py", "ddp"},
      {"labs/train_distributed:ddp", "ddp"},
      {"labs/train_distributed/zero3.py", "zero3"},
      {"labs/train_distributed/optimized_zero3.py", "zero3"},
      {"baseline_ddp_flash.py", "ddp_flash"},
      {"optimized_symmem_training.py", "symmem_training"},
      {"train_fsdp.py", "fsdp"},
      {"baseline_fsdp.py", "fsdp"},
      {"baseline_pipeline_1f1b.py", "pipeline_1f1b"},
      {"labs/train_distributed:1f1b_2stages", "pipeline_1f1b"},
      {"pipeline_gpipe_2stages", "pipeline_gpipe"},
      {"dualpipe_2stages", "pipeline_dualpipe"},
      {"dualpipev_2stages", "pipeline_dualpipev"},
      {"pipeline.py", "pipeline"},
      {"labs/distributed_training/baseline_fsdp2_standard.py", "memory_ladder"},
      {"labs/distributed_training/optimized_fsdp2_fp8.py", "fsdp_fp8"},
      {"01-ddp-basics/ddp_benchmark.py", "scaling"},
      {"05-advanced/hybrid_parallelism.py", "hybrid_parallelism"},
      {"05-advanced/gradient_accumulation.py", "accumulation"},
      {"05-advanced/communication_overlap.py", "ddp"},
      {"benchmarks/distributed_benchmarks.py", "ddp"}};
  for (const auto& [word, name] : spellings) EXPECT_EQ(name_of(word), name) << word;
}

TEST(Targets, StagesOfANameAreRanks) {
  EXPECT_EQ(find_targets("labs/train_distributed:1f1b_4stages")[0].ranks, 4);
  EXPECT_EQ(find_targets("labs/train_distributed:1f1b_2stages")[0].ranks, 2);
  EXPECT_FALSE(find_targets("pipeline_1f1b")[0].ranks);
}

TEST(Targets, AChapterIsAllOfItsTargets) {
  std::set<std::string> names;
  for (const Choice& choice : find_targets("labs/train_distributed/")) names.insert(choice.target->name);
  for (const char* name :
       {"ddp", "ddp_flash", "ddp_buckets", "ddp_compression", "fsdp", "symmem_training", "zero1", "zero2",
        "zero3", "pipeline_gpipe", "pipeline_1f1b", "pipeline_dualpipe", "pipeline_dualpipev"})
    EXPECT_TRUE(names.contains(name)) << name;
  EXPECT_FALSE(names.contains("tensor_parallel"));
  EXPECT_EQ(find_targets("labs/distributed_training").size(), 2u);
}

TEST(Targets, WhatIsNotThereIsAnsweredWithTheNearestName) {
  EXPECT_NE(refusal_of("zero4").find("did you mean 'zero1'"), std::string::npos) << refusal_of("zero4");
  EXPECT_NE(refusal_of("labs/train_distributd").find("did you mean 'labs/train_distributed'"),
            std::string::npos)
      << refusal_of("labs/train_distributd");
  EXPECT_NE(refusal_of("labs/train_distributed:tensor_parallel").find("its chapters are meshes"),
            std::string::npos);
  EXPECT_NE(refusal_of("bandwidth_test.py").find("'trireme bench comm' measures it"), std::string::npos);
  EXPECT_THROW(targets_of_chapter("05-advancde"), ConfigError);
}

TEST(Targets, NoNameHasTwoMeanings) {
  std::set<std::string> names;
  for (const std::string& chapter : all_chapters()) EXPECT_TRUE(names.insert(chapter).second) << chapter;
  for (const Target& target : all_targets()) {
    EXPECT_TRUE(names.insert(target.name).second) << target.name;
    for (const std::string& alias : target.aliases) EXPECT_TRUE(names.insert(alias).second) << alias;
  }
}

/// Every arm of every comparison, as it would be trained.
template <typename Visit>
void for_every_arm(Visit visit) {
  for (const Target& target : all_targets()) {
    for (const Comparison* comparison : {&target.declared, &target.documents}) {
      for (const char* device : {"cpu", "cuda"}) {
        for (const Arm& arm : arms_on(*comparison, device, 8)) visit(target, *comparison, arm, device);
      }
    }
  }
}

/// Throws where a run with these keys would be refused.
void plan_on(int64_t ranks, const std::vector<std::string>& keys) {
  const plan::Config config = plan::load({.path = "", .text = "", .overrides = keys}, Environment()).config;
  const plan::BatchPlan batch = plan::plan_batch(config, plan::MeshShape::fit(config.parallel, ranks));
  if (config.parallel.pp > 1) plan::plan_pipeline(config, batch);
}

TEST(Targets, EveryArmCanBePlannedOnAllOfItsRanks) {
  for_every_arm([](const Target& target, const Comparison&, const Arm& arm, const std::string& device) {
    for (const int64_t ranks : target.ranks) {
      if (arm.ranks > ranks) continue;
      EXPECT_NO_THROW(plan_on(ranks_of(arm, ranks), keys_of(target, arm, device, ranks)))
          << target.name << " " << arm.name << " " << device << " " << ranks;
    }
  });
}

/// Two keys that say the same thing of one arm, or an arm that is its reference, would compare a thing with
/// itself.
TEST(Targets, ArmsDifferFromTheirReference) {
  for_every_arm(
      [](const Target& target, const Comparison& comparison, const Arm& arm, const std::string& device) {
        const Arm& reference = comparison.arms.front();
        if (&comparison.arms.front() == &arm || arm.name == reference.name) return;
        EXPECT_TRUE(arm.keys != reference.keys || arm.ranks != reference.ranks)
            << target.name << " " << arm.name << " " << device;
      });
}

/// Arms of other workloads would be blocked.
TEST(Targets, ArmsTrainOneWorkload) {
  for_every_arm([](const Target& target, const Comparison& comparison, const Arm& arm, const std::string&) {
    const Arm& reference = comparison.arms.front();
    for (const auto& [these, those] : {std::pair(&arm, &reference), std::pair(&reference, &arm)}) {
      for (const std::string& key : these->keys) {
        if (std::ranges::find(those->keys, key) != those->keys.end()) continue;
        EXPECT_FALSE(is_of_workload(key.substr(0, key.find('='))))
            << target.name << " " << arm.name << " " << key;
      }
    }
  });
}

TEST(Targets, OneThingIsDeclaredToBeDifferent) {
  for (const Target& target : all_targets()) {
    EXPECT_GE(target.declared.arms.size(), 2u) << target.name;
    EXPECT_FALSE(target.declared.difference.empty()) << target.name;
    EXPECT_FALSE(target.declared.expected.empty()) << target.name;
    EXPECT_EQ(target.declared.arms.front().owed == Owed::kNearLosses, false)
        << target.name << ": all others are compared with it";
  }
}

TEST(Targets, SayWhyTheyDoNotRun) {
  const Target& fp8 = *find_targets("fsdp_fp8")[0].target;
  EXPECT_EQ(obstacle(fp8, "cpu", {}, {}), "it needs a GPU, or --precision.fp8_fallback=emulate");
  EXPECT_EQ(obstacle(fp8, "cpu", 2, {"precision.fp8_fallback=emulate"}), "");
  EXPECT_EQ(obstacle(fp8, "cuda", 2, {}), "");
  const Target& hybrid = *find_targets("hybrid_sharding")[0].target;
  EXPECT_EQ(obstacle(hybrid, "cpu", 2, {}), "it takes 4 or 8 ranks, not 2");
  EXPECT_EQ(obstacle(hybrid, "cpu", {}, {}), "");
}

TEST(Targets, ArmsThatNeedAGpuAreLeftOutOnCpus) {
  const Target& fsdp = *find_targets("fsdp")[0].target;
  EXPECT_EQ(arms_on(fsdp.documents, "cuda", 2).size(), arms_on(fsdp.documents, "cpu", 2).size() + 1);
}

TEST(Targets, ALadderOfRanksEndsWhereTheyDo) {
  const Target& scaling = *find_targets("scaling")[0].target;
  EXPECT_EQ(arms_on(scaling.declared, "cpu", 2).size(), 2u);
  EXPECT_EQ(arms_on(scaling.declared, "cpu", 4).size(), 3u);
}

}  // namespace
}  // namespace trireme::bench
