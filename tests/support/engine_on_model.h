#pragma once
// A language model and the engine that trains it, as tests want them.
#include <memory>
#include <utility>

#include "trireme/comm/mesh.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/model_facts.h"
#include "trireme/train/connect.h"

namespace trireme::test {

/// Units are blocks; weights are those of `seed`.
struct EngineOnModel {
  EngineOnModel(const plan::ModelConfig& config, const plan::ModelFacts& facts,
                const std::shared_ptr<comm::World>& world, const parallel::Options& options, uint64_t seed,
                const plan::MemoryConfig& memory = {})
      : EngineOnModel(config, facts, comm::make_mesh(world, plan::MeshShape::fit({}, world->size())), options,
                      seed, memory) {}
  EngineOnModel(const plan::ModelConfig& config, const plan::ModelFacts& facts, const comm::Mesh& mesh,
                const parallel::Options& options, uint64_t seed, const plan::MemoryConfig& memory = {})
      : model(nn::build(config)),
        engine(*model, facts.units, mesh, summing(options), nn::InitialWeights(config, seed)) {
    train::connect(*model, engine, memory);
  }
  EngineOnModel(const EngineOnModel&) = delete;
  EngineOnModel& operator=(const EngineOnModel&) = delete;

  std::shared_ptr<nn::LanguageModel> model;
  parallel::DataParallel engine;

 private:
  /// As the trainer has it.
  static parallel::Options summing(parallel::Options options) {
    options.average = parallel::Average::kSum;
    return options;
  }
};

}  // namespace trireme::test
