#pragma once
// The passes of a model over the stages that this rank has: those of one stage, which is all of the
// model (whole_passes.h), or those of a pipeline (staged_passes.h).
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "trireme/comm/mesh.h"
#include "trireme/data/batch.h"
#include "trireme/nn/model.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline_report.h"
#include "trireme/train/program.h"

namespace trireme::train {

class Guesses;

/// Parts that a model of a run is made from; all of them outlive the model.
struct ModelSetup {
  const plan::Config& config;
  const plan::ModelFacts& facts;  ///< of the whole model
  const plan::ModelFacts& held;   ///< of what this rank has of it
  const plan::BatchPlan& batch;
  const comm::Mesh& mesh;
  bool records_passes = false;                   ///< as can_record() said
  const std::vector<Metric>* metrics = nullptr;  ///< of the program; null: none
};

/// Sums over rows.
struct Scores {
  double rows = 0.0, loss = 0.0;
  double top1 = 0.0, top5 = 0.0;  ///< images whose label is the likeliest class, one of the five likeliest
  std::vector<double> own = {};   ///< those of the program's metrics, one after the other; empty: no rows yet

  Scores& operator+=(const Scores& other) {
    rows += other.rows;
    loss += other.loss;
    top1 += other.top1;
    top5 += other.top5;
    own.resize(std::max(own.size(), other.own.size()));
    for (size_t i = 0; i < other.own.size(); ++i) own[i] += other.own[i];
    return *this;
  }
};

/// Scores of B >= 1 images: logits (B, classes), targets (B) int64 on the same device.
Scores score_images(const at::Tensor& logits, const at::Tensor& targets);

/// A stage that this rank has. Each member refers to those before it.
struct TrainedStage {
  int64_t index = 0;
  std::shared_ptr<torch::nn::Module> module = {};
  std::shared_ptr<parallel::DataParallel> engine = {};
  std::unique_ptr<optim::Optimizer> optimizer = {};
};

class ModelPasses {
 public:
  virtual ~ModelPasses() = default;
  ModelPasses(const ModelPasses&) = delete;
  ModelPasses& operator=(const ModelPasses&) = delete;

  /// Forward and backward passes of the micro-batches that next() gives, on all ranks of a pipeline the same.
  /// Each counts by its share of the step; gradients come multiplied by `scale` and are reduced at the end.
  /// Returns the share of this rank's rows in the mean loss of the step, an fp64 scalar on the device; ranks
  /// of a pipeline, and those along tp, return the same. Collective.
  virtual at::Tensor run(const std::function<data::Batch()>& next, double scale) = 0;
  /// Batches that evaluate() takes at once.
  virtual int64_t batches_at_once() const = 0;
  /// The scores that this rank adds for all rows that count, and the sums of `metrics`. `guesses`, if
  /// there are any, get the rows of images. The model evaluates. Collective.
  virtual Scores evaluate(const std::vector<data::Batch>& batches, const std::vector<Metric>& metrics,
                          Guesses* guesses) = 0;
  /// Tokens (1, T) on the device -> what `last`, which gives (V) fp32 of one rank's logits (1, T, V), makes
  /// of the model's, on every rank. The model evaluates. Collective.
  virtual at::Tensor infer(const at::Tensor& inputs,
                           const std::function<at::Tensor(const at::Tensor& logits)>& last) = 0;

  /// Sent so far between stages.
  virtual int64_t sent_bytes() { return 0; }
  /// Whether forward passes are asked from now on what they keep for backward, where that can be told, and
  /// the most that one kept; 0: not told.
  virtual void measure_activations(bool) {}
  virtual int64_t activation_bytes() const { return 0; }
  /// Kinds of passes that are launched as recordings.
  virtual int64_t recorded() const { return 0; }
  /// Whether steps of a pipeline are reported from now on, event by event.
  virtual void report_steps(bool) {}
  /// A report of the last step for which that was so, by all ranks; none: there is no pipeline. Collective.
  virtual std::optional<plan::PipelineReport> step_report() { return std::nullopt; }

 protected:
  ModelPasses() = default;
};

/// The model of which a stage of this rank has some units, or all; parameters are uninitialised. Norms of
/// images that go over ranks go over those of `mesh`, that of the stage's engine.
std::shared_ptr<nn::Model> make_model(const ModelSetup& setup, const comm::Mesh& mesh);

/// This rank's program of train.step_program. Throws ConfigError as plan::given_programs().
plan::StepProgram given_program(const ModelSetup& setup);

}  // namespace trireme::train
