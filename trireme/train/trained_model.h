#pragma once
// The model that the training loop trains: in one or more stages, of which this rank has some, each with its
// engine and optimizer.
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/nn/fp8_history.h"
#include "trireme/state/state_file.h"
#include "trireme/train/adapter.h"
#include "trireme/train/generate.h"
#include "trireme/train/model_passes.h"
#include "trireme/train/stage_plan.h"

namespace trireme::train {

class TrainedModel {
 public:
  /// A model as the config says. Collective. Throws as parallel::DataParallel and parallel::Pipeline.
  explicit TrainedModel(const ModelSetup& setup);
  TrainedModel(const TrainedModel&) = delete;
  TrainedModel& operator=(const TrainedModel&) = delete;

  /// The stages that this rank has, in their order.
  const std::vector<TrainedStage>& stages() const { return stages_; }
  /// Names of the units of all stages, on every rank the same.
  const std::vector<std::string>& units() const { return plan_.units; }
  ModelPasses& passes() { return *passes_; }

  // A step: passes, a look at the gradient, then step() or skip_step().

  /// Runs the passes of a step, as ModelPasses::run(). Returns what this rank adds to its mean loss.
  /// Collective.
  at::Tensor run_passes(const std::function<data::Batch()>& next, double scale);
  /// (stages + units) fp64 on the device: sums of squares of this rank's part of the gradient by stage, then
  /// by unit, 0 for stages of others.
  at::Tensor grad_squares() const;
  /// The sum of squares by stage over all ranks and stages: (ranks, stages) -> ().
  at::Tensor sum_over_ranks(const at::Tensor& squares) const;
  double sum_over_ranks(const std::vector<std::vector<double>>& squares) const;
  /// A parameter whose gradient is not finite on this rank; empty: none.
  std::string nonfinite_parameter() const;
  /// Updates the parameters, with gradients multiplied by `scale`. Collective.
  void step(double lr, const optim::GradScale& scale);
  /// Forgets the gradient. Collective.
  void skip_step();

  // What a step costs this rank.

  /// Sent so far for gradients, parameters and between stages.
  int64_t sent_bytes() const;
  void measure(bool on);
  parallel::CommTimes take_times();
  /// Held between steps.
  plan::StateBytes state_bytes() const;
  /// Of the device, beside the allocator of torch.
  int64_t symmetric_bytes() const { return engine().symmetric_bytes(); }
  /// Whether units keep their memory for recorded passes (parallel::DataParallel::stay_in_place()).
  bool stays_in_place() const { return engine().stays_in_place(); }

  // Between steps; collective.

  /// Ranks take over the running statistics of the first that has the stage, with which all evaluate alike.
  void sync_buffers();
  /// Scores of `batches`, as ModelPasses::evaluate(), without dropout and gradients.
  Scores evaluate(const std::vector<data::Batch>& batches, Guesses* guesses);
  /// The metrics that are counted beside the loss.
  const std::vector<Metric>& metrics() const { return metrics_; }
  /// The tokens that follow `prompt`, the same on every rank.
  std::vector<int32_t> generate(std::vector<int32_t> prompt, const SamplingOptions& options);
  void average_parameters();
  /// Parameters and their averages change places, as parallel::DataParallel has it.
  void swap_averages();
  /// Options with which a stage reads a file of the whole model: it leaves to others what is theirs.
  state::LoadOptions load_options() const { return {.unexpected = plan_.stages() > 1}; }
  /// Parameters take the values of `path`, as state::load_weights() has it; each rank reads its part.
  void load_weights(const std::string& path);
  /// Weights under adapters take the values of `path`, as state::load_frozen() has it.
  void load_base(const std::string& path);
  /// Adapters take the values of a folder of PEFT, if it notes no other base (train/adapter.h).
  void load_adapter(const std::string& folder, const std::string& base);
  /// A hash of the weights under adapters, by which two runs know whether they stand on the same ones: it
  /// depends on the dtype of computation, and on no mesh. A rank that has all of the model tells of what it
  /// has itself, others of what rank 0 is given.
  std::string base_digest();
  /// Rank 0 writes all weights as one file, of one parameter at a time; with adapters those that they make
  /// (save_merged()). Throws EnvironmentError on every rank when it cannot.
  void save_weights(const std::string& path, const state::Notes& notes = {});
  /// Rank 0 writes the adapters into a folder, with a note of their base (train/adapter.h).
  void save_adapter(const std::string& folder, const std::string& base);
  /// A digest of the whole model as parallel::weights_digest(), with adapters of these alone; on ranks as
  /// base_digest().
  std::string weights_digest();

  /// Of delayed scaling, the same on all ranks between steps; null: scales are not delayed.
  nn::Fp8History* fp8_history() const { return fp8_history_.get(); }

 private:
  using Body = AdaptedModel::Body;
  /// Whole weights of the engines of this rank.
  using Readers = std::vector<parallel::DataParallel::Weights>;

  /// Engines of one rank share their groups.
  parallel::DataParallel& engine() const { return *stages_.front().engine; }
  bool in_one_piece() const { return !plan_.pipeline; }
  void end_fp8_step();
  at::Tensor next_logits(const at::Tensor& tokens);

  Readers readers();
  /// The stage with this index; null: it is not here.
  const TrainedStage* stage_here(int64_t index) const;
  /// A whole parameter of the model, on the CPU of rank 0 of the job, on whose way it has `dtype`, and of
  /// ranks that have all of the model; undefined on others. Collective.
  at::Tensor whole(const std::string& name, Readers& readers, at::ScalarType dtype = at::kFloat);
  /// Calls body(name, tensor as whole() has it) for every parameter of the model that is trained, or frozen
  /// for good, in name order, with one of them on its way at a time. Collective.
  void visit_weights(bool frozen, const Body& body);
  /// Calls body() for every buffer, in its dtype.
  void visit_buffers(const Body& body);
  /// `mine`, which the first data-parallel rank of a stage has, where whole() has it.
  at::Tensor on_root(const at::Tensor& mine, const StagePlan::Saved& saved, at::ScalarType dtype);
  AdaptedModel adapted();

  const plan::Config& config_;
  const plan::ModelFacts& facts_;
  const comm::Mesh& mesh_;
  std::vector<Metric> metrics_;
  StagePlan plan_;
  std::unique_ptr<nn::Fp8History> fp8_history_;
  std::vector<TrainedStage> stages_;
  std::unique_ptr<ModelPasses> passes_;
};

}  // namespace trireme::train
