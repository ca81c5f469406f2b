#pragma once
// The families of targets: targets of one shape have one file.
#include <string>
#include <vector>

#include "trireme/bench/target.h"

namespace trireme::bench {

// Chapters, as published material has them.
inline const std::string kTrainLab = "labs/train_distributed";
inline const std::string kShardingLab = "labs/distributed_training";
inline const std::string kBasics = "01-ddp-basics";
inline const std::string kSharding = "02-fsdp";
inline const std::string kAdvanced = "05-advanced";
inline const std::string kBenchmarks = "benchmarks";
inline const std::string kMeshes = "meshes";  ///< of our own

std::vector<Target> replicated_targets();  ///< ddp and what travels between its ranks
std::vector<Target> sharded_targets();     ///< ZeRO, FSDP, and the memory that they save
std::vector<Target> pipeline_targets();
std::vector<Target> mesh_targets();  ///< layers and sequences that are cut, and several axes at once
std::vector<Target> scaling_targets();
std::vector<Target> accumulation_targets();  ///< micro-batches, and what happens between them
std::vector<Target> checkpoint_targets();

/// The model, data and optimizer of targets that train a language model: small on CPUs, of a size that keeps
/// a GPU busy there. The learning rate is constant, so that runs of any number of steps begin alike.
struct LanguageModel {
  std::vector<std::string> workload, on_cpu, on_gpu;
};
LanguageModel language_model();

/// A target with that workload.
Target on_language_model(Target target);

}  // namespace trireme::bench
