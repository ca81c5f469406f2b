#pragma once
// What the training loop trains: a model with its engines and optimizers, of which this rank has all
// (whole_model.h) or some stages of a pipeline (staged_model.h).
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/comm/mesh.h"
#include "trireme/data/batch.h"
#include "trireme/nn/context.h"
#include "trireme/nn/fp8_history.h"
#include "trireme/nn/joint.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/parallel/state_file.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline_report.h"
#include "trireme/train/adapter.h"
#include "trireme/train/generate.h"
#include "trireme/train/program.h"

namespace trireme::train {

/// What a model of a run is made from; all of it outlives the model.
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

/// The joint of a model that is cut over the ranks of the mesh along tp; null: it is whole. `model` is
/// complete.
nn::JointPtr joint_of(const plan::ModelConfig& model, const comm::Mesh& mesh);

/// The context of a model whose sequences are split over the ranks of the mesh along cp; null: they are
/// whole. `config` is complete.
nn::ContextPtr context_of(const plan::Config& config, const comm::Mesh& mesh);
/// Logits (B, T / n, V) of the tokens of each rank along cp -> those of all, (B, T, V). Collective over them.
at::Tensor logits_of_all(const at::Tensor& logits, const plan::TokenSplit& tokens, const comm::Mesh& mesh);

/// The sum of one number for each rank of a stage, in the order of their ranks, over its data-parallel ranks
/// as its engine has it (DataParallel::sum_over_ranks), then over those along tp.
at::Tensor sum_over_stage(const parallel::DataParallel& engine, const at::Tensor& by_rank,
                          const plan::MeshShape& mesh);
double sum_over_stage(const parallel::DataParallel& engine, const std::vector<double>& by_rank,
                      const plan::MeshShape& mesh);

/// Of B >= 1 images: logits (B, classes), targets (B) int64 on the same device.
Scores score_images(const at::Tensor& logits, const at::Tensor& targets);

class Guesses;

class TrainedModel {
 public:
  struct Part {
    std::shared_ptr<parallel::DataParallel> engine;
    std::unique_ptr<optim::Optimizer> optimizer;
  };

  virtual ~TrainedModel() = default;
  TrainedModel(const TrainedModel&) = delete;
  TrainedModel& operator=(const TrainedModel&) = delete;

  /// One for each stage that this rank has, in their order.
  const std::vector<Part>& parts() const { return parts_; }

  // A step: passes, a look at the gradient, then step() or skip_step().

  /// Forward and backward passes of the micro-batches that next() gives, on all ranks of a pipeline the same.
  /// Each counts by its share of the step; gradients come multiplied by `scale` and are reduced at the end.
  /// Returns what this rank adds to the mean loss of the step, an fp64 scalar on the device. Collective.
  virtual at::Tensor run_passes(const std::function<data::Batch()>& next, double scale) = 0;
  /// (stages) fp64 on the device: sums of squares of this rank's part of the gradient, 0 for stages of
  /// others. A model in one piece is one stage.
  virtual at::Tensor grad_squares() const = 0;
  /// The sum of these over all ranks and stages: (ranks, stages) -> ().
  virtual at::Tensor sum_over_ranks(const at::Tensor& squares) const = 0;
  virtual double sum_over_ranks(const std::vector<std::vector<double>>& squares) const = 0;
  /// (units) the same by unit of the whole model, and the names of the units, on every rank the same.
  virtual at::Tensor unit_grad_squares() const = 0;
  virtual const std::vector<std::string>& units() const = 0;
  /// A parameter whose gradient is not finite on this rank; empty: none.
  std::string nonfinite_parameter() const;
  /// Updates the parameters, with gradients multiplied by `scale`. Collective.
  void step(double lr, const optim::GradScale& scale);
  /// Forgets the gradient. Collective.
  void skip_step();

  // What a step costs this rank.

  /// Sent so far for gradients, parameters and between stages.
  virtual int64_t sent_bytes() const = 0;
  void measure(bool on);
  parallel::CommTimes take_times();
  /// Held between steps.
  plan::StateBytes state_bytes() const;
  /// Of the device, beside the allocator of torch.
  int64_t symmetric_bytes() const;
  /// Whether forward passes are asked from now on what they keep for backward, where that can be told, and
  /// the most that one kept; 0: not told.
  virtual void measure_activations(bool) {}
  virtual int64_t activation_bytes() const { return 0; }
  /// Whether steps in stages are recorded from now on, event by event.
  virtual void record_steps(bool) {}
  /// What all ranks did in the last step that was recorded; none: there are no stages. Collective.
  virtual std::optional<plan::PipelineReport> step_report() { return std::nullopt; }
  /// Kinds of passes that are launched as recordings.
  virtual int64_t recorded_passes() const { return 0; }
  /// Whether units keep their memory for them (parallel::DataParallel::stay_in_place()).
  bool stays_in_place() const { return parts_.front().engine->stays_in_place(); }

  // Between steps; collective.

  /// Ranks take over rank 0's running statistics, with which all evaluate alike.
  virtual void sync_buffers() {}
  /// How many batches evaluate() takes.
  virtual int64_t batches_at_once() const = 0;
  /// What this rank adds to the scores of all rows that count. Without dropout and gradients. `guesses`, if
  /// there are any, get the rows of images.
  virtual Scores evaluate(const std::vector<data::Batch>& batches, Guesses* guesses) = 0;
  /// That the scores are counted for beside the loss.
  const std::vector<Metric>& metrics() const { return metrics_; }
  /// The tokens that follow `prompt`, the same on every rank.
  virtual std::vector<int32_t> generate(std::vector<int32_t> prompt, const SamplingOptions& options) = 0;
  void average_parameters();
  /// Parameters and their averages change places, as parallel::DataParallel has it.
  void swap_averages();
  /// Parameters take the values of `path`, as parallel::load_weights() has it; each rank reads its part.
  /// `stages`: of a pipeline, which each want a part of the tensors.
  void load_weights(const std::string& path, bool stages);
  /// Weights under adapters take the values of `path`, as parallel::load_frozen() has it; `stages` as in
  /// load_weights().
  void load_base(const std::string& path, bool stages);
  /// Adapters take the values of a folder of PEFT, if it notes no other base (train/adapter.h).
  void load_adapter(const std::string& folder, const std::string& base);
  /// As parallel::frozen_digest(), of the weights under adapters of the whole model; the same on every rank.
  virtual std::string base_digest() = 0;
  /// Rank 0 writes all weights as one file; with adapters those that they make (save_merged()). Throws
  /// EnvironmentError on every rank when it cannot.
  virtual void save_weights(const std::string& path, const parallel::Notes& notes = {}) = 0;
  /// Rank 0 writes the adapters into a folder, with a note of their base (train/adapter.h).
  void save_adapter(const std::string& folder, const std::string& base);
  /// As parallel::weights_digest(), of the whole model, with adapters of these alone; the same on every rank.
  virtual std::string weights_digest() = 0;

  /// Of delayed scaling, the same on all ranks between steps; null: scales are not delayed.
  nn::Fp8History* fp8_history() const { return fp8_history_.get(); }

 protected:
  explicit TrainedModel(const ModelSetup& setup);
  /// The model as adapters and their base are read from it.
  virtual AdaptedModel adapted() = 0;
  std::vector<Part> parts_;
  /// What a batch adds to the sums of metrics().
  std::vector<double> own_sums(const at::Tensor& logits, const at::Tensor& targets) const;

 private:
  void end_fp8_step();

  const plan::ModelConfig& model_config_;
  const plan::ModelFacts& facts_of_all_;
  std::vector<Metric> metrics_;
  std::shared_ptr<comm::Group> all_ranks_;
  std::unique_ptr<nn::Fp8History> fp8_history_;
};

/// This rank's program of train.step_program. Throws ConfigError as plan::given_programs().
plan::StepProgram given_program(const ModelSetup& setup);

/// As the config says. Collective. Throws as parallel::DataParallel and parallel::Pipeline.
std::unique_ptr<TrainedModel> make_trained_model(const ModelSetup& setup);

}  // namespace trireme::train
