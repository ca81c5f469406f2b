#pragma once
// What a training run is put together from, as its config says: data, and a model with its engines and
// optimizers.
#include <memory>

#include "trireme/comm/mesh.h"
#include "trireme/comm/world.h"
#include "trireme/data/corpus.h"
#include "trireme/data/dataset.h"
#include "trireme/data/loader.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"
#include "trireme/train/trained_model.h"
#include "trireme/train/trainer.h"

namespace trireme::train {

/// Whether passes may be recorded: train.cuda_graphs is not off, and nothing known speaks against it. Rank 0
/// warns where train.cuda_graphs=on cannot be honoured.
bool can_record(const plan::Config& config, const comm::World& world);

struct Parts {
  /// `options` must outlive this. Collective. Throws as train().
  Parts(const TrainOptions& options, std::shared_ptr<comm::World> world, bool records_passes);
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  /// Reads the training data from global position `cursor` on, a multiple of the global batch.
  void open_loader(int64_t cursor);

  bool is_root() const { return world->rank() == 0; }
  bool on_gpu() const { return world->device().is_cuda(); }

  const TrainOptions& options;
  const plan::Config& config;
  std::shared_ptr<comm::World> world;
  comm::Mesh mesh;
  plan::BatchPlan batch;
  plan::ModelFacts facts;
  data::PreparedCorpus corpus;
  bool records_passes;                                  ///< as can_record() said
  std::shared_ptr<data::Dataset> train_data, val_data;  ///< no val_data: nothing is validated
  std::unique_ptr<TrainedModel> model;
  std::unique_ptr<data::Loader> loader;

 private:
  void open_data();
  void open_validation();
};

/// Why two equal runs may end with different weights; empty when they cannot.
std::string why_bits_vary(const Parts& parts);

/// Log lines of rank 0 about what is about to run.
void announce(const Parts& parts);

}  // namespace trireme::train
